"""Everything before the first request: memory plan, numerics, graph plan, warm-up and the parity check."""
