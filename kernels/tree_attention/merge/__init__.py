"""Merging of splits: partial results of the same pairs over different token indices."""
