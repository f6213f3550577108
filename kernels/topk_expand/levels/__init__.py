"""Expansion of one level of a tree in one launch, or in two if the vocabulary is large."""
