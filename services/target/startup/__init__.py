"""Prepares the target for the first request: memory plan, numerics, graph plan, warm-up, parity check."""
