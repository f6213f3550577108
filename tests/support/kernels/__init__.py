"""Kernels without a GPU: compiled variants, rehearsed launches, and attention in plain torch."""
