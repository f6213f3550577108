"""Decides how many tokens to draft per round, from measured costs and acceptance. No tensors."""
