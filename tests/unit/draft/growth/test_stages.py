"""Stages of a draft model: which passes run, which states wait for the next round, which rows hide."""

from __future__ import annotations

import torch

from outrider.services.draft.growth.draft_model import DraftModel
from outrider.services.draft.growth.stages import (
    HiddenLevels,
    StageStates,
    after_last,
    fresh_slots,
    passes_of,
)
from outrider.shared.kv.pool import KVPool

CPU = torch.device("cpu")
HIDDEN = 3


class Chain(DraftModel):
    """A model without layers, of which only the sizes are used."""

    device, dtype, hidden_size, lead = CPU, torch.float32, HIDDEN, 0

    def __init__(self, stages: int) -> None:
        self.stages = stages


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_stage_that_takes_over_runs_the_earlier_levels_first() -> None:
    assert passes_of(Chain(1), 3) == [[(1, 0)], [(2, 0)], [(3, 0)]]
    assert passes_of(Chain(2), 3) == [[(1, 1)], [(2, 1)], [(3, 1)]]
    assert passes_of(Chain(3), 4) == [[(1, 1)], [(1, 2), (2, 2)], [(3, 2)], [(4, 2)]]


def test_states_wait_at_their_place_until_the_sequence_ends() -> None:
    kept = StageStates(Chain(3), KVPool(8, 4, 1, 1, 2, torch.float32, CPU))
    places = kept.places(ints(5, 2, 5), ints(1, 3, 0))  # the last sequence is idle
    assert places.tolist() == [5, 2, 8]
    states = torch.arange(18.0).view(3, 2, HIDDEN)
    kept.keep(places, states, ints(4, 9, 0), ints(1, 3, 0))
    assert torch.equal(kept.read(places[:2]), states[:2])
    # The first sequence has no new row, so its state stays.
    assert kept.fresh_rows(places, ints(4, 11, 0), ints(2, 3, 0)).tolist() == [0, 2, 0]
    kept.keep(places, -states, ints(4, 11, 0), ints(0, 2, 0))
    assert torch.equal(kept.read(places[:2]), torch.stack([states[0], -states[1]]))
    kept.clear(5)
    assert kept.fresh_rows(places, ints(1, 11, 0), ints(1, 3, 0)).tolist() == [1, 0, 0]


def test_a_stage_reads_the_waiting_state_before_the_new_ones() -> None:
    states = torch.arange(1.0, 9.0).view(2, 4, 1)
    joined = after_last(states, torch.tensor([[-1.0], [-2.0]]), ints(4, 2))
    assert joined[0, :, 0].tolist() == [-1, 1, 2, 3]
    assert joined[1, 2:, 0].tolist() == [-2, 7]
    assert fresh_slots(torch.arange(8), ints(4, 2)).tolist() == [0, 1, 2, 3, -1, -1, 6, 7]


def test_levels_before_position_0_are_hidden_from_all_other_rows() -> None:
    masks = HiddenLevels(stage=2, depth=4, topk=1, device=CPU)
    chain = ints(0b111, 0b111, 0b111)[:, None]  # rows of level 3 of three sequences
    assert masks.apply(chain, 3, ints(0, 1, 5)).flatten().tolist() == [0b100, 0b110, 0b111]
    first = ints(0b1, 0b1, 0b1)[:, None]
    assert masks.apply(first, 1, ints(0, 1, 5)).flatten().tolist() == [0b1, 0b1, 0b1]
    wide = HiddenLevels(stage=3, depth=9, topk=8, device=CPU)
    every = torch.full((8, 2), -1, dtype=torch.int32)
    assert wide.apply(every, 8, ints(0)).tolist() == [[-(1 << 24), -1]] * 8
