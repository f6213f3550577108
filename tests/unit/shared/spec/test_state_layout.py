"""States of rounds on the wire: compact states contain the parts in use, and expand to the same block."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from outrider.shared.base.errors import ProtocolError
from outrider.shared.spec.resident import HEADER_BYTES, RoundState, StateLayout, packed_bytes

GROUPS = [(3, 4, 8), (1, 2, 8), (5, 6, 8)]
"""Rows, columns and feature width of each group."""


def make_states(rng: random.Random) -> tuple[torch.Tensor, list[RoundState]]:
    """Return the block of a round with random contents, and its states."""
    sizes = [packed_bytes(bs, columns, width, torch.float32) for bs, columns, width in GROUPS]
    block = torch.zeros(sum(sizes), dtype=torch.uint8)
    states, start = [], 0
    for (bs, columns, width), size in zip(GROUPS, sizes, strict=True):
        state = RoundState.of_packed(block[start : start + size], bs, columns, width, torch.float32)
        state.counts.copy_(torch.tensor([rng.randrange(columns + 1) for _ in range(bs)]))
        state.tokens.random_(100)
        state.features.normal_()
        states.append(state)
        start += size
    return block, states


@pytest.mark.parametrize("seed", range(20))
def test_an_expanded_state_has_all_valid_rows(seed: int) -> None:
    block, states = make_states(random.Random(seed))
    layout = StateLayout([state.layout for state in states])
    compact = b"".join(layout.compact(block.numpy().data))
    assert len(compact) <= layout.used_bytes(block.numpy().data) <= len(block)
    received, copies = make_states(random.Random(seed + 1))
    layout.expand(compact, received.numpy().data)
    for sent, found in zip(states, copies, strict=True):
        for name in ("committed_lens", "counts", "tokens"):
            assert torch.equal(getattr(sent, name), getattr(found, name))
        for row, count in enumerate(sent.counts.tolist()):
            assert torch.equal(sent.features[row, :count], found.features[row, :count])


def test_rejected_tokens_are_not_sent() -> None:
    block, states = make_states(random.Random(0))
    for state in states:
        state.counts.fill_(1)
    layout = StateLayout([state.layout for state in states])
    heads = sum(group.features_start for group in layout.groups)
    rows = sum(bs * width * 4 for bs, _, width in GROUPS)
    assert sum(map(len, layout.compact(block.numpy().data))) == heads + rows


@pytest.mark.parametrize("change", [-1, 1, -300])
def test_a_compact_state_of_a_wrong_size_is_refused_and_changes_nothing(change: int) -> None:
    block, states = make_states(random.Random(3))
    layout = StateLayout([state.layout for state in states])
    compact = b"".join(layout.compact(block.numpy().data))
    received = bytearray(len(block))
    with pytest.raises(ProtocolError, match="bytes; expected"):
        layout.expand((compact + b"0")[: len(compact) + change], memoryview(received))
    assert not any(received)


def test_absurd_counts_are_bounded_by_the_columns() -> None:
    block, states = make_states(random.Random(4))
    layout = StateLayout([state.layout for state in states])
    whole = bytearray(block.numpy().tobytes())
    first = layout.groups[0]
    first.counts.pack_into(whole, HEADER_BYTES + first.counts.size, (1 << 31) - 1, -1, -(1 << 31))
    compact = b"".join(layout.compact(memoryview(whole)))
    received = bytearray(len(block))
    layout.expand(compact, memoryview(received))
    assert struct.unpack_from("<i", received, HEADER_BYTES + first.counts.size) == ((1 << 31) - 1,)
