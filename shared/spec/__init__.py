"""Vocabulary of speculative decoding: algorithms, draft trees, fences, and the interface of a drafter."""
