"""Decoders for inference: configuration, strict checkpoint loading, layers, the Llama-family decoder, features for drafters."""
