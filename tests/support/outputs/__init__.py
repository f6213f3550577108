"""Checks of what an engine generates: mixtures of requests, oracles, comparisons and planted faults."""
