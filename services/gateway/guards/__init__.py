"""Protects the gateway from silent connections, large request bodies and texts that are too long."""
