"""Engines, drafts and random-weight models that benchmarks build, mostly in the benchmark's process."""
