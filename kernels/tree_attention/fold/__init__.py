"""The inner loop of tree_attention, over token indices."""
