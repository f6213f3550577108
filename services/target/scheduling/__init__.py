"""Continuous batching: admission, the request queue, and which sequences own KV pages."""
