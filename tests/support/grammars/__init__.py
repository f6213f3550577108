"""Grammars, schemas and vocabularies for tests of constrained output."""
