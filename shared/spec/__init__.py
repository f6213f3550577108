"""Vocabulary of speculative decoding: algorithms, draft trees, fences, drafter interface, device rounds."""
