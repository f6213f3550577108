"""Engines, drafts and random-weight models that benchmarks build, mostly in their own process."""
