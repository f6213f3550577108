"""The order of candidates in Triton: the keys of the package, their inverse, and the best of a block."""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))  # below every key of a number


@triton.jit
def rank_key(values, index):
    """Return int64 keys whose descending order is (fp32 value descending, index ascending)."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_index(key):
    """Return the index that a key was made from."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def key_value(key):
    """Return the fp32 value that a key was made from."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_keys(keys, k, BLOCK: tl.constexpr):
    """Return the k largest keys of a block, descending, in the first k places of a block of BLOCK (the rest NO_KEY)."""
    place = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NO_KEY, tl.int64)
    for i in range(k):
        top = tl.max(keys, 0)
        best = tl.where(place == i, top, best)
        keys = tl.where(keys == top, NO_KEY, keys)
    return best
