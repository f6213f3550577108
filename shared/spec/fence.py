"""The fence identifies the state of a sequence, so that draft messages for an outdated state are dropped."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
MASK_64 = (1 << 64) - 1


def extend_prefix_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Extend the FNV-1a 64-bit hash of a token sequence by more tokens. The first hash is `FNV_OFFSET`.

    Each token id is hashed as four little-endian bytes. The earlier tokens are not needed to extend the hash.
    """
    for token_id in token_ids:
        for byte in struct.pack("<I", token_id):
            prefix_hash = ((prefix_hash ^ byte) * FNV_PRIME) & MASK_64
    return prefix_hash


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
