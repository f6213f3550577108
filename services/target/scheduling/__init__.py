"""Continuous batching: admission, the request queue, and the ownership of KV pages."""
