"""Drafters and draft services that a test drives, alone or as a pair with a target."""
