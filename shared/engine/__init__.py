"""Shared by the target's and the draft's engine: the engine thread, CUDA graphs and bucket sizes."""
