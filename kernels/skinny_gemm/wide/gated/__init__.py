"""The gated product of more than a few rows."""
