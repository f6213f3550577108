"""The prefix hash of a fence: arrays and a loop over bytes give the same hash."""

from __future__ import annotations

import random
import struct

import pytest

from outrider.shared.spec.fence import (
    BLOCK_BYTES,
    FNV_OFFSET,
    FNV_PRIME,
    MANY_TOKENS,
    MASK_64,
    extend_prefix_hash,
)

BLOCK_TOKENS = BLOCK_BYTES // 4


def byte_by_byte(prefix_hash: int, tokens: list[int]) -> int:
    for byte in struct.pack(f"<{len(tokens)}I", *tokens):
        prefix_hash = ((prefix_hash ^ byte) * FNV_PRIME) & MASK_64
    return prefix_hash


def random_tokens(count: int, below: int = 1 << 32) -> list[int]:
    draw = random.Random(count)
    return [draw.randrange(below) for _ in range(count)]


@pytest.mark.parametrize(
    "count",
    [
        0,
        1,
        MANY_TOKENS - 1,
        MANY_TOKENS,
        MANY_TOKENS + 1,
        BLOCK_TOKENS,
        BLOCK_TOKENS + 1,
        2 * BLOCK_TOKENS + 7,
    ],
)
@pytest.mark.parametrize("below", [1, 128_256, 1 << 32])
def test_every_length_has_the_hash_of_a_loop_over_bytes(count: int, below: int) -> None:
    tokens = random_tokens(count, below)

    assert extend_prefix_hash(FNV_OFFSET, tokens) == byte_by_byte(FNV_OFFSET, tokens)


def test_the_parts_of_a_sequence_have_the_hash_of_the_whole() -> None:
    tokens = random_tokens(4 * MANY_TOKENS)
    whole = extend_prefix_hash(FNV_OFFSET, tokens)

    for cut in (1, MANY_TOKENS - 1, MANY_TOKENS, 2 * MANY_TOKENS + 3):
        first = extend_prefix_hash(FNV_OFFSET, tokens[:cut])
        assert extend_prefix_hash(first, tuple(tokens[cut:])) == whole


def test_every_token_of_a_long_sequence_counts() -> None:
    tokens = random_tokens(MANY_TOKENS)
    whole = extend_prefix_hash(FNV_OFFSET, tokens)

    for index in (0, 1, MANY_TOKENS // 2, MANY_TOKENS - 1):
        for change in (1, 1 << 7, 1 << 8, 1 << 31):
            changed = [*tokens]
            changed[index] ^= change
            assert extend_prefix_hash(FNV_OFFSET, changed) != whole
