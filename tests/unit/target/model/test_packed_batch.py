"""Entries of packed rounds: sampling modes, padding, and uploads."""

from __future__ import annotations

import pytest
import torch
from support.engine.slot_sequences import TREE, seated_sequence
from support.suite.compute_device import DEVICE

from outrider.services.target.model.packed_batch import (
    Entry,
    PackedBatch,
    SamplingMode,
    width_class,
)
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.generation import SamplingParams
from outrider.shared.base.logit_rules import LogitRules
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

ROWS, SLOTS = 24, 4


@pytest.fixture
def pool() -> KVPool:
    return KVPool(64, 4, 1, 1, 2, torch.float32, DEVICE, feature_size=3)


@pytest.fixture
def batch() -> PackedBatch:
    return PackedBatch(ROWS, SLOTS, columns=4, max_nodes=8, device=torch.device(DEVICE))


def entry(sequence: Sequence, shape: DraftShape = NO_DRAFT) -> Entry:
    return Entry(sequence, sequence.residence, shape)


def test_widths_fall_into_few_classes() -> None:
    assert [width_class(rows) for rows in (1, 2, 8, 9, 64, 65, 128, 129)] == [1, 8, 8, 64, 64, 128, 128, 256]


@pytest.mark.parametrize(
    ("samplings", "mode"),
    [
        ([], SamplingMode.GREEDY),
        ([SamplingParams(0.0), SamplingParams(0.0, top_k=5)], SamplingMode.GREEDY),
        ([SamplingParams(0.0), SamplingParams(0.7)], SamplingMode.NOISE),
        ([SamplingParams(0.7), SamplingParams(0.7, top_p=0.9)], SamplingMode.FILTERED),
        ([SamplingParams(0.7, top_k=3)], SamplingMode.FILTERED),
        ([SamplingParams(0.7, min_p=0.1), SamplingParams(0.0)], SamplingMode.FILTERED),
        ([SamplingParams(0.7, min_p=0.1), SamplingParams(0.7)], SamplingMode.FILTERED),
        ([SamplingParams(0.0), SamplingParams(0.0, rules=LogitRules(1.0))], SamplingMode.FULL),
    ],
)
def test_a_round_has_the_cheapest_mode_that_serves_all(
    pool: KVPool, samplings: list[SamplingParams], mode: SamplingMode
) -> None:
    sequences = [
        seated_sequence(pool, index, index, sampling=sampling) for index, sampling in enumerate(samplings)
    ]
    assert SamplingMode.of(sequences) is mode


def test_an_entry_counts_its_rows_and_columns(pool: KVPool) -> None:
    sequence = seated_sequence(pool, 1, 0)
    plain, tree, cut = (entry(sequence, shape) for shape in (NO_DRAFT, TREE, DraftShape(5, 1, 3)))
    assert [(one.rows, one.columns) for one in (plain, tree, cut)] == [(1, 1), (7, 4), (3, 3)]


def test_an_entry_is_void_once_its_sequence_has_left(pool: KVPool) -> None:
    sequence = seated_sequence(pool, 1, 2)
    planned = entry(sequence)
    assert not planned.void
    sequence.slot = -1
    assert planned.void
    sequence.slot, sequence.residence = 2, 2
    assert planned.void, "a later residence in the same slot is another one"


def test_real_entries_come_first_and_padding_owns_the_other_rows(batch: PackedBatch, pool: KVPool) -> None:
    tree, plain = seated_sequence(pool, 1, 3), seated_sequence(pool, 2, 1)
    tree.feature_len = tree.cached_len
    batch.load([entry(tree, TREE), entry(plain)], 12)
    entries = batch.entries(12)
    assert entries.slots.tolist() == [3, 1] + [-1] * 10
    assert entries.drafted.tolist() == [1, 0] + [0] * 10
    assert entries.captures.tolist() == [1, 0] + [0] * 10
    assert entries.starts.tolist() == [0, 7, 8, 9, 10, 11, 12, 12, 12, 12, 12, 12, 12]


def test_a_full_round_has_no_padding_rows(batch: PackedBatch, pool: KVPool) -> None:
    sequences = [seated_sequence(pool, slot, slot) for slot in range(SLOTS)]
    batch.load([entry(one) for one in sequences], SLOTS)
    entries = batch.entries(SLOTS)
    assert entries.slots.tolist() == [0, 1, 2, 3]
    assert entries.starts.tolist() == [0, 1, 2, 3, 4]


def test_idle_rounds_have_only_padding(batch: PackedBatch, pool: KVPool) -> None:
    batch.load([entry(seated_sequence(pool, 1, 0), TREE)], 8)
    batch.make_idle(8)
    entries = batch.entries(8)
    assert set(entries.slots.tolist()) == {-1}
    assert entries.starts.tolist() == list(range(9))
    assert not entries.drafted.any()


def test_an_unchanged_round_is_not_uploaded_again(batch: PackedBatch, pool: KVPool) -> None:
    sequence = seated_sequence(pool, 1, 0)
    batch.load([entry(sequence, TREE)], 8)
    slots = batch.entries(8).slots
    slots.fill_(9)
    batch.load([entry(sequence, TREE)], 8)
    assert slots.tolist() == [9] * 8, "equal entries must not be copied"
    batch.load([entry(sequence)], 8)
    assert slots.tolist() == [0] + [-1] * 7
    slots.fill_(9)
    batch.load([entry(sequence)], 4)
    assert slots.tolist()[:4] == [0, -1, -1, -1], "another number of rows is another round"


def test_all_sizes_share_their_addresses(batch: PackedBatch) -> None:
    for small, large in zip(
        (batch.entries(4).slots, batch.trees(4).ancestors, batch.trees(4).logprobs),
        (batch.entries(16).slots, batch.trees(16).ancestors, batch.trees(16).logprobs),
        strict=True,
    ):
        assert small.data_ptr() == large.data_ptr()
    assert batch.trees(4).logprobs.dtype == torch.float32


def test_results_are_bounded_by_rows_and_slots(batch: PackedBatch) -> None:
    assert [batch.results(rows) for rows in (1, 3, 4, 20)] == [1, 3, 4, 4]
