"""Passes over the vocabulary of a row in parts, and the merge of their results."""
