"""The fence identifies the state of a sequence, so that draft messages for an outdated state are dropped."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
MASK_64 = (1 << 64) - 1
MANY_TOKENS = 512
"""Number of tokens from which on the hash is computed by arrays, which is faster than a loop over bytes."""
BLOCK_BYTES = 1 << 16
"""Largest number of bytes that are hashed by arrays at a time."""

Bytes = npt.NDArray[np.uint8]


def extend_prefix_hash(prefix_hash: int, token_ids: Sequence[int]) -> int:
    """Extend the FNV-1a 64-bit hash of a token sequence by more tokens. The first hash is `FNV_OFFSET`.

    Each token id is hashed as four little-endian bytes. The earlier tokens are not needed to extend the hash.
    """
    if len(token_ids) >= MANY_TOKENS:
        data = np.array(token_ids, dtype="<u4").view(np.uint8)
        for start in range(0, len(data), BLOCK_BYTES):
            prefix_hash = _extend_by_arrays(prefix_hash, data[start : start + BLOCK_BYTES])
        return prefix_hash
    for token_id in token_ids:
        for byte in struct.pack("<I", token_id):
            prefix_hash = ((prefix_hash ^ byte) * FNV_PRIME) & MASK_64
    return prefix_hash


def _extend_by_arrays(prefix_hash: int, data: Bytes) -> int:
    """Extend the hash by the bytes of one block.

    FNV-1a replaces the hash h by ``(h ^ byte) * P``, with the prime P. An XOR with a byte changes only the
    lowest byte of h, so ``h ^ byte`` equals h plus a change that depends on the two lowest bytes alone. If
    these changes are known, the hash after n bytes is a sum: P^n times the first hash, and P^(n - i) times
    the change at byte i.
    """
    powers, count = _powers(), len(data)
    lowest = _lowest_bytes(prefix_hash & 0xFF, data)
    changes = (lowest ^ data).astype(np.int64) - lowest
    added = np.sum(changes.view(np.uint64) * powers[count - 1 :: -1])
    return (prefix_hash * int(powers[count - 1]) + int(added)) & MASK_64


def _lowest_bytes(first: int, data: Bytes) -> Bytes:
    """Return the lowest byte of the hash before each byte of `data`.

    Each pass of the loop finds one more bit of all results. The lower bits are then known, so they show what
    each XOR changes. At the new bit itself, an XOR and an addition have the same effect.
    """
    rest, start = len(data) - 1, np.uint8(first)
    powers, inverses = _powers()[:rest].astype(np.uint8), _inverse_powers()[:rest]
    lowest = np.zeros_like(data)
    for bit in range(8):
        changes = (lowest ^ data) - lowest
        changes[1:] *= inverses
        sums = _running_sums(changes) + start
        lowest[1:] = sums[:-1] * powers
        lowest[0] = start
        lowest &= np.uint8((2 << bit) - 1)
    return lowest


def _running_sums(values: Bytes) -> Bytes:
    """Return the sums of the first values, modulo 256. `np.cumsum` takes several times as long."""
    sums, distance = values.copy(), 1
    while distance < len(sums):
        sums[distance:] += sums[:-distance]
        distance *= 2
    return sums


@cache
def _powers() -> npt.NDArray[np.uint64]:
    """Return the first `BLOCK_BYTES` powers of the prime modulo 2^64, beginning with the prime itself."""
    return np.cumprod(np.full(BLOCK_BYTES, FNV_PRIME, dtype=np.uint64), dtype=np.uint64)


@cache
def _inverse_powers() -> Bytes:
    """Return the inverses of `_powers` modulo 256."""
    return np.cumprod(np.full(BLOCK_BYTES, pow(FNV_PRIME, -1, 256), dtype=np.uint8), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Fence:
    """Identifies the state of a sequence at one moment.

    Messages between target and draft contain a fence. If this fence differs from the receiver's own fence of
    the sequence, the receiver drops the message. The draft session of this sequence is then opened again.
    Other sequences are not affected.

    Attributes:
        session_id: Id of the sequence, unique within one target process.
        epoch: Incremented when the sequence is opened again, is retracted, or gets another draft service.
        committed_len: Number of committed tokens, including the root.
        prefix_hash: `extend_prefix_hash` over all committed tokens.
    """

    session_id: int
    epoch: int
    committed_len: int
    prefix_hash: int
