"""EAGLE draft heads: one module per kind of network, and the registry that picks the right one."""
