"""Converts the 64-bit seed of a request to the signed integer that tensors store."""

from __future__ import annotations

from outrider.shared.base.generation import MAX_SEED


def signed_seed(seed: int) -> int:
    """Return the int64 that has the same bits as the lowest 64 bits of `seed`."""
    seed &= MAX_SEED
    return seed - (1 << 64) if seed >= 1 << 63 else seed
