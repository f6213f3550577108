"""Runs a user's own pair with speculation on and off, and compares tokens and probabilities (`verify`)."""
