"""Measurements: rounds, speculation end to end, perplexity, and the machine's ceilings."""
