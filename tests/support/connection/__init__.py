"""Connections between services: fake streams and relays, proxies, old messages, and certificates."""
