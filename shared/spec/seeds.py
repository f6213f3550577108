"""Converts the 64-bit seed of a request to the signed integer that tensors store."""

from __future__ import annotations

MASK_64 = (1 << 64) - 1


def signed_seed(seed: int) -> int:
    """Return the int64 that has the same bits as the lowest 64 bits of `seed`."""
    seed &= MASK_64
    return seed - (1 << 64) if seed >= 1 << 63 else seed
