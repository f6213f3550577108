"""Shared types of speculative decoding: algorithms, draft trees, fences, the drafter interface, rounds."""
