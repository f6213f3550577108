"""Gated product of more than a few rows."""
