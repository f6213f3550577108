"""Measurements: rounds and prefill, end-to-end speculation, perplexity, and the machine's ceilings."""
