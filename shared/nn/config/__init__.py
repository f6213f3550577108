"""Parses and checks a model's config.json. Errors name the key and the fix."""
