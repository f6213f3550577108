"""Runs a pair with speculation on and off, and compares tokens and probabilities (`outrider verify`)."""
