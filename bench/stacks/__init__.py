"""Engines, drafts and models that benchmarks build in their own process."""
