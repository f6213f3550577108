"""The loop over token indices of attention."""
