"""Layers for inference (linear, norm, attention, MLP, experts, rotary embedding), and their loading."""
