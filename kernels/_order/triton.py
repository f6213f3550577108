"""Triton version of the candidate order: sort keys, their inverses, and the best keys of a block."""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))  # below the key of every number
NO_SHORT_KEY = tl.constexpr(-(1 << 31))  # below every key of `short_key`
SHORT_INDEX = tl.constexpr(4095)
"""Largest offset within a block that fits into a key of `short_key`."""
WIDE_INDEX = tl.constexpr(0xFFFF)
"""Largest index that fits into a key of `narrowed`, which has 16 bits of value and 16 bits of index."""


@triton.jit
def ordered_bits(values):
    """Return int32 values in the order of the given fp32 values; -0 and +0 are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_key(values, index):
    """Return int64 keys whose descending order is (fp32 value descending, index ascending)."""
    return (ordered_bits(values).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def short_key(values, place):
    """Return one int32 key for each element of a block. The keys sort like those of `rank_key`.

    The values must be exact in bf16. `place` is the offset of each element within the block, below 4096.

    Short keys are half as wide as keys of `rank_key` and therefore twice as fast to compare. The hardware
    also finds the maximum of a warp of int32 values in one instruction.
    """
    return ((ordered_bits(values) >> 16) << 12) | (SHORT_INDEX - place)


@triton.jit
def lengthen_key(short, first):
    """Return the `rank_key` of a key that `short_key` returned.

    `first` is the index, within the row, of the block's first element.
    """
    upper = short >> 12
    ordered = (upper << 16) | tl.where(upper < 0, 0xFFFF, 0)
    place = SHORT_INDEX - (short & SHORT_INDEX)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - (first + place)).to(tl.int64)


@triton.jit
def narrowed(key):
    """Convert keys of `rank_key` to int32 keys in the same order.

    The values must be exact in bf16, and the indices at most `WIDE_INDEX`. NO_KEY becomes NO_SHORT_KEY.
    """
    return (((key >> 48) << 16) | (key & WIDE_INDEX)).to(tl.int32)


@triton.jit
def widened(narrow):
    """Return the `rank_key` that `narrowed` was computed from."""
    upper = narrow >> 16
    ordered = (upper << 16) | tl.where(upper < 0, 0xFFFF, 0)
    key = (ordered.to(tl.int64) << 32) | ((narrow & WIDE_INDEX) + (0x7FFFFFFF - WIDE_INDEX)).to(tl.int64)
    return tl.where(narrow == NO_SHORT_KEY, NO_KEY, key)


@triton.jit
def value_of_bits(ordered):
    """Return the fp32 values that `ordered_bits` was computed from. A -0 becomes +0."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_index(key):
    """Return the index that a key was computed from."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def key_value(key):
    """Return the fp32 value that a key was computed from."""
    return value_of_bits((key >> 32).to(tl.int32))


@triton.jit
def best_keys(keys, k, BLOCK: tl.constexpr):
    """Return the k largest keys of a block in descending order, in a block of BLOCK padded with NO_KEY."""
    place = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NO_KEY, tl.int64)
    for i in range(k):
        top = tl.max(keys, 0)
        best = tl.where(place == i, top, best)
        keys = tl.where(keys == top, NO_KEY, keys)  # keys are distinct: this removes exactly one
    return best


@triton.jit
def best_short_keys(keys, k, BLOCK: tl.constexpr):
    """Return the same as `best_keys`, for short keys."""
    place = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NO_SHORT_KEY, tl.int32)
    for i in range(k):
        top = tl.max(keys, 0)
        best = tl.where(place == i, top, best)
        keys = tl.where(keys == top, NO_SHORT_KEY, keys)
    return best


@triton.jit
def best_keys_of_rows(keys, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return `best_keys` of every row of ``keys [ROWS, n]``, as ``[ROWS, BLOCK]``."""
    place = tl.arange(0, BLOCK)
    best = tl.full((ROWS, BLOCK), NO_KEY, tl.int64)
    for i in range(k):
        top = tl.max(keys, 1)
        best = tl.where((place == i)[None, :], top[:, None], best)
        keys = tl.where(keys == top[:, None], NO_KEY, keys)
    return best
