"""Reads published head checkpoints: the dialects of config.json, tensor names and shapes, and token maps."""
