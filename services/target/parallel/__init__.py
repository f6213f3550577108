"""Tensor parallelism: starts the ranks, loads their shares of the weights, and ends all ranks together."""
