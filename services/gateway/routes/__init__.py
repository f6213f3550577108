"""The REST routes, one module per family. They only translate requests and replies for the core."""
