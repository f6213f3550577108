"""Reads checkpoint files: parses their JSON, checks every tensor, and copies weights to the device."""
