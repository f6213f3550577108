"""Benchmarks that users run too (`outrider bench`), and what they measured (results/)."""
