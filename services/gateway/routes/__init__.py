"""The REST routes, one file per family. They translate; what happens is in the core."""
