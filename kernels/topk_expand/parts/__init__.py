"""Passes over parts of a row's vocabulary, and the merge of the parts' results."""
