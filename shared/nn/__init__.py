"""Decoders for inference: configuration, checkpoint loading, layers, model families, drafter features."""
