"""Finds the best default tree shape for a pair, a device and prompts, and writes a profile (`tune`)."""
