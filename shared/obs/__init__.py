"""Observability: structured logs and Prometheus metrics. Imports no torch."""
