"""Protects the gateway from clients: connections without requests, large bodies, too long texts."""
