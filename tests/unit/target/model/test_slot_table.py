"""The state of slots on the device: parameters, pages, owners, first tokens and features."""

from __future__ import annotations

import pytest
import torch
from support.engine.slot_sequences import seated_sequence
from support.suite.compute_device import DEVICE

from outrider.services.target.model import slot_table
from outrider.services.target.model.slot_table import SlotTable
from outrider.shared.base.generation import SamplingParams
from outrider.shared.kv.pool import KVPool

SLOTS, COLUMNS, PAGES = 3, 4, 6


@pytest.fixture
def pool() -> KVPool:
    return KVPool(32, 4, 1, 1, 2, torch.float32, DEVICE, feature_size=3)


@pytest.fixture
def table(pool: KVPool) -> SlotTable:
    return SlotTable(SLOTS, COLUMNS, pool, PAGES, vocab_size=64)


def test_a_new_table_is_idle(table: SlotTable) -> None:
    assert table.slots == SLOTS
    assert table.state.counts.tolist() == [0] * SLOTS
    assert table.state.committed_lens.tolist() == [1] * SLOTS
    assert table.features.shape == (SLOTS, COLUMNS, 3)


def test_parameters_and_pages_are_written_at_the_next_flush(table: SlotTable, pool: KVPool) -> None:
    sampling = SamplingParams(0.5, top_k=7, top_p=0.75, min_p=0.25, seed=(1 << 64) - 3, choice_index=2)
    sequence = seated_sequence(pool, 1, 2, sampling=sampling, max_new_tokens=20)
    table.hold(sequence)
    assert table.state.limits.tolist() == [0, 0, 0], "the rounds in flight read the old state"
    assert not table.page_table.any()
    table.flush()
    assert table.state.limits.tolist() == [0, 0, 5 + 20]
    rows = table.sampling
    assert rows.temperature.tolist() == [0.0, 0.0, 0.5]
    assert rows.top_k.tolist() == [0, 0, 7]
    assert rows.top_p.tolist()[2] == 0.75
    assert rows.min_p.tolist()[2] == 0.25
    assert rows.seeds.tolist() == [0, 0, -3]
    assert rows.choices.tolist() == [0, 0, 2]
    assert sequence.lease is not None
    pages = sequence.lease.pages
    assert table.page_table[2].tolist() == [*pages, *[0] * (PAGES - len(pages))]


def test_only_new_pages_are_written(table: SlotTable, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = seated_sequence(pool, 1, 0, room=3)
    assert sequence.lease is not None
    assert len(sequence.lease.pages) == 2
    table.hold(sequence)
    table.flush()
    written = []
    real = slot_table.upload
    monkeypatch.setattr(
        slot_table, "upload", lambda values, *rest: (written.append(len(values)), real(values, *rest))[1]
    )
    table.hold(sequence)
    table.flush()
    assert not written, "a sequence that has not changed is not written"
    sequence.lease.extend(2)
    table.hold(sequence)
    table.flush()
    assert written == [2, 2], "places and pages of the two new pages"
    assert table.page_table[0, :4].tolist() == sequence.lease.pages


def test_a_slot_whose_owner_changes_before_the_flush_is_written_once(
    table: SlotTable, pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, `index_copy_` with repeated indices may keep the pages of the earlier owner."""
    table.hold(seated_sequence(pool, 1, 0, room=7))
    second = seated_sequence(pool, 2, 0, room=3)
    table.hold(second)
    written = []
    real = slot_table.upload
    monkeypatch.setattr(
        slot_table, "upload", lambda values, *rest: (written.append(list(values)), real(values, *rest))[1]
    )
    table.flush()
    assert second.lease is not None
    assert written[-2:] == [[0, 1], second.lease.pages]
    assert table.page_table[0, :2].tolist() == second.lease.pages


def test_several_sequences_are_written_together(table: SlotTable, pool: KVPool) -> None:
    sequences = [seated_sequence(pool, slot, slot, room=3 + 4 * slot) for slot in range(SLOTS)]
    for sequence in sequences:
        table.hold(sequence)
    table.flush()
    for sequence in sequences:
        assert sequence.lease is not None
        pages = sequence.lease.pages
        assert table.page_table[sequence.slot, : len(pages)].tolist() == pages


@pytest.mark.parametrize("change", ["session", "residence"])
def test_a_new_owner_of_a_slot_overwrites_the_last(table: SlotTable, pool: KVPool, change: str) -> None:
    first = seated_sequence(pool, 1, 1, room=8)
    table.hold(first)
    table.flush()
    assert first.lease is not None
    first.lease.release()
    pool.lease(4)  # the next owner gets other pages
    if change == "session":
        owner = seated_sequence(pool, 2, 1, sampling=SamplingParams(0.9), room=3)
    else:
        owner = first
        owner.lease, owner.residence = pool.lease(8), 2
    table.hold(owner)
    table.flush()
    assert owner.lease is not None
    pages = owner.lease.pages
    assert table.page_table[1, : len(pages)].tolist() == pages
    assert table.sampling.temperature[1].item() == pytest.approx(owner.request.sampling.temperature)


def test_a_first_token_seats_its_sequence(table: SlotTable, pool: KVPool) -> None:
    sequences = [seated_sequence(pool, slot, slot, prompt=[1] * (4 + slot)) for slot in (0, 2)]
    table.seat(sequences, torch.tensor([9, 11], device=DEVICE))
    assert table.state.committed_lens.tolist() == [5, 1, 7]
    assert table.state.counts.tolist() == [1, 0, 1]
    assert table.state.tokens[:, 0].tolist() == [9, 0, 11]


def test_an_invalid_first_token_leaves_its_slot_idle(table: SlotTable, pool: KVPool) -> None:
    sequence = seated_sequence(pool, 1, 1)
    table.seat([sequence], torch.tensor([5], device=DEVICE))
    table.seat([sequence], torch.tensor([-1], device=DEVICE))
    assert table.state.counts.tolist() == [0, 0, 0]
    assert table.state.tokens[1, 0].item() == 0, "kernels must not look up token -1"


def test_the_prompts_last_feature_row_comes_along(table: SlotTable, pool: KVPool) -> None:
    fed, unfed = seated_sequence(pool, 1, 0), seated_sequence(pool, 2, 1)
    fed.feature_len = fed.cached_len
    for sequence in (fed, unfed):
        assert sequence.lease is not None
        slots = torch.tensor(pool.token_slots(sequence.lease, 0, 5), device=DEVICE)
        pool.store_features(torch.arange(15.0, device=DEVICE).view(5, 3) + 100 * sequence.slot, slots)
    table.seat([fed, unfed], torch.tensor([9, 9], device=DEVICE))
    assert table.features[0, 0].tolist() == [12.0, 13.0, 14.0]
    assert not table.features[1].any()


def test_seating_nobody_writes_nothing(table: SlotTable) -> None:
    table.seat([], torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert table.state.counts.tolist() == [0] * SLOTS


def test_features_follow_the_pool(table: SlotTable, pool: KVPool) -> None:
    pool.resize_features(8)
    table.resize_features()
    assert table.features.shape == (SLOTS, COLUMNS, 8)
