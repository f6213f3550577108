"""The fence identifies the state of a sequence, so that draft messages for an outdated state are dropped."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
MASK_64 = (1 << 64) - 1


def extend_prefix_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Extend the FNV-1a 64-bit hash of a token sequence. The hash of no tokens is `FNV_OFFSET`.

    Each id is hashed as four little-endian bytes. To extend the hash, target and draft need only the new
    tokens.
    """
    for token_id in token_ids:
        for byte in struct.pack("<I", token_id):
            prefix_hash = ((prefix_hash ^ byte) * FNV_PRIME) & MASK_64
    return prefix_hash


@dataclass(frozen=True, slots=True)
class Fence:
    """Identifies the state of a sequence at one moment.

    If a message's fence differs from the receiver's fence of that sequence, the receiver drops the message,
    and only that sequence is opened again.

    Attributes:
        session_id: Id of the sequence, unique within one target process.
        epoch: Incremented when the sequence is opened again, is retracted, or gets another draft.
        committed_len: Number of committed tokens, including the root.
        prefix_hash: `extend_prefix_hash` over all committed tokens.
    """

    session_id: int
    epoch: int
    committed_len: int
    prefix_hash: int
