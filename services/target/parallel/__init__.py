"""The tensor-parallel group: starts the ranks, loads their shares of the weights, and ends all of them together."""
