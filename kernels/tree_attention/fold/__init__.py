"""The loop of attention over token indices."""
