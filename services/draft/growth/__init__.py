"""Extends sessions with committed tokens and grows draft trees, in steps or as one CUDA graph per round."""
