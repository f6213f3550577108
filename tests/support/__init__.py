"""Helpers for tests: toy models, harnesses, rigs and processes."""
