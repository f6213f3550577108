"""Engines, drafts and random-weight models that benchmarks build, and the services that they start."""
