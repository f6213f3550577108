"""Extends sessions with committed tokens and grows draft trees."""
