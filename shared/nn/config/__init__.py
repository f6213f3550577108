"""Parses and checks a model's config.json; an error names the key and the fix."""
