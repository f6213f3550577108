"""Draft heads: the networks, one module per kind, and the registry that finds the one a checkpoint needs."""
