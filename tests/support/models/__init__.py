"""Tiny targets, draft heads and tokenizers, their plain references, and damaged copies of model folders."""
