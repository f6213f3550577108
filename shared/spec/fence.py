"""The fence: what a draft message must match to concern the sequence as it is now."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
MASK_64 = (1 << 64) - 1


def extend_prefix_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Continue the FNV-1a 64-bit hash of a token sequence; start from `FNV_OFFSET`.

    Each id is hashed as four little-endian bytes, so both ends can extend the hash by new tokens alone.
    """
    for token_id in token_ids:
        for byte in struct.pack("<I", token_id):
            prefix_hash = ((prefix_hash ^ byte) * FNV_PRIME) & MASK_64
    return prefix_hash


@dataclass(frozen=True, slots=True)
class Fence:
    """Identifies a sequence at one moment. A message whose fence differs is dropped, and that one sequence reopens.

    Attributes:
        session_id: The sequence, unique within one target process.
        epoch: Raised by one on reopening, retraction and change of draft.
        committed_len: Chosen tokens, the root included.
        prefix_hash: `extend_prefix_hash` over all committed tokens.
    """

    session_id: int
    epoch: int
    committed_len: int
    prefix_hash: int
