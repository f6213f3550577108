"""The session table: lost, repeated, reordered or forged messages never lead to a wrong state."""

from __future__ import annotations

import pytest
import torch
from support.drafts.session_table import (
    OTHER,
    PEER,
    VOCAB,
    WIDTH,
    Table,
    ask,
    commit_of,
    expect,
    fence_of,
    opening,
    rows_of,
    started,
)

from outrider.services.draft.sessions.feature_queue import (
    EARLY_LIFE_S,
    MAX_EARLY_ROWS,
    MAX_ROWS_AHEAD,
    FeatureQueue,
)
from outrider.services.draft.sessions.session import MessageVerdict, RefusalReason, RowSource
from outrider.services.draft.sessions.session_table import SessionLimits
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.tree import DraftShape


@pytest.fixture
def table() -> Table:
    return Table()


def test_a_session_is_ready_when_its_features_reach_the_root(table: Table) -> None:
    tokens = [1, 2, 3, 4]
    table.open(PEER, opening(tokens[:3]), 0.0)
    expect(table.commit(PEER, commit_of(tokens, 3), ask(), 0.0), MessageVerdict.ACCEPTED)
    assert table.ready() == []
    table.add_features(PEER, 1, 1, 0, rows_of(tokens, 0, 2), 0.0)
    assert [session.session_id for session in table.ready()] == [1]
    table.extend_all()
    assert table.ready()[0].cached_rows == 3


def test_the_latest_commit_wins_and_repeats_are_idempotent(table: Table) -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    session = started(table, tokens[:3])
    for _ in range(2):
        expect(table.commit(PEER, commit_of(tokens[:4], 3), ask(1), 0.0), MessageVerdict.ACCEPTED)
    expect(table.commit(PEER, commit_of(tokens, 3), ask(2), 0.0), MessageVerdict.ACCEPTED)
    expect(
        table.commit(PEER, commit_of(tokens[:4], 3), ask(1), 0.0), MessageVerdict.DROPPED, RefusalReason.LATE
    )
    assert session.tokens == tokens
    assert session.ask is not None
    assert session.ask.round == 2
    table.extend_all()
    table.check()


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        (commit_of([1, 2, 3, 4, 5], 4), RefusalReason.GAP),
        (commit_of([1, 2, 9, 4], 3), RefusalReason.PREFIX_MISMATCH),
        (commit_of([1, 2, 3, VOCAB], 3), RefusalReason.MALFORMED),
        (Commit(fence_of([1, 2, 3, 4]), 3, [4, 5], None), RefusalReason.MALFORMED),
        (Commit(fence_of([1, 2, 3, 4]), 0, [1, 2, 3, 4], None), RefusalReason.MALFORMED),
        (Commit(fence_of([1, 2, 3, 4]), 3, [4], torch.zeros(1, WIDTH + 1)), RefusalReason.MALFORMED),
        (Commit(fence_of([1, 2, 3, 4]), 3, [4], torch.zeros(2, WIDTH)), RefusalReason.MALFORMED),
        (commit_of([1] * 61, 3, features=False), RefusalReason.TOO_LONG),
        (commit_of([1, 2, 3, 4], 3, epoch=2), RefusalReason.UNKNOWN_EPOCH),
        (commit_of([1, 2, 3, 4], 3, session_id=9), RefusalReason.UNKNOWN_SESSION),
    ],
)
def test_what_does_not_fit_asks_for_a_resync_and_frees_that_session_only(
    table: Table, commit: Commit, reason: RefusalReason
) -> None:
    started(table, [1, 2, 3])
    started(table, [4, 5], session_id=2)
    table.extend_all()
    expect(table.commit(PEER, commit, ask(), 0.0), MessageVerdict.RESYNC, reason)
    assert (table.get(PEER, 1) is None) == (commit.fence.session_id == 1)
    assert table.get(PEER, 2) is not None
    table.check()


def test_older_epochs_are_dropped_everywhere(table: Table) -> None:
    started(table, [1, 2, 3])
    table.open(PEER, opening([1, 2, 3], epoch=5), 0.0)
    expect(
        table.open(PEER, opening([1, 2, 3], epoch=4), 0.0), MessageVerdict.DROPPED, RefusalReason.STALE_EPOCH
    )
    expect(
        table.commit(PEER, commit_of([1, 2, 3, 4], 3, epoch=4), ask(), 0.0),
        MessageVerdict.DROPPED,
        RefusalReason.STALE_EPOCH,
    )
    expect(
        table.add_features(PEER, 1, 4, 0, rows_of([1, 2, 3], 0, 3), 0.0),
        MessageVerdict.DROPPED,
        RefusalReason.STALE_EPOCH,
    )
    session = table.get(PEER, 1)
    assert session is not None
    assert session.features.contiguous == 0


def test_reopening_keeps_the_rows_of_the_common_prefix_but_the_last(table: Table) -> None:
    tokens = list(range(10))
    started(table, tokens)
    table.extend_all()
    held = table.pages.held_pages
    branched = [*tokens[:6], 40, 41, 42]
    answer = table.open(PEER, opening(branched, epoch=2), 0.0)
    assert answer.have_len == 5
    assert table.pages.held_pages == held
    table.add_features(PEER, 1, 2, 5, rows_of(branched, 5, 9), 0.0)
    table.extend_all()
    table.check()
    assert table.open(PEER, opening(branched, epoch=3), 0.0).have_len == len(branched) - 2


def test_features_may_overtake_their_open(table: Table) -> None:
    tokens = [1, 2, 3, 4]
    expect(
        table.add_features(PEER, 1, 1, 0, rows_of(tokens, 0, 2), 0.0),
        MessageVerdict.DROPPED,
        RefusalReason.EARLY,
    )
    expect(
        table.add_features(PEER, 1, 1, 2, rows_of(tokens, 2, 4), 0.0),
        MessageVerdict.DROPPED,
        RefusalReason.EARLY,
    )
    table.open(PEER, opening(tokens), 0.1)
    table.extend_all()
    session = table.get(PEER, 1)
    assert session is not None
    assert session.cached_rows == 3


def test_early_features_are_bounded_in_number_and_time(table: Table) -> None:
    chunk = torch.zeros(MAX_EARLY_ROWS // 4, WIDTH)
    for session_id in range(9):
        table.add_features(PEER, session_id, 1, 0, chunk, float(session_id))
        assert len(table._early) <= MAX_EARLY_ROWS
    table.expire(EARLY_LIFE_S + 6)
    assert len(table._early) == chunk.shape[0] * 2
    table.drop_peer(PEER)
    assert len(table._early) == 0


def test_a_gap_in_the_bulk_stream_asks_for_a_resync(table: Table) -> None:
    table.open(PEER, opening([1, 2, 3, 4]), 0.0)
    expect(
        table.add_features(PEER, 1, 1, 1, rows_of([1, 2, 3, 4], 1, 3), 0.0),
        MessageVerdict.RESYNC,
        RefusalReason.FEATURE_GAP,
    )


def test_a_full_table_evicts_the_least_recently_used_idle_session_or_rejects(table: Table) -> None:
    for session_id in (1, 2, 3):
        started(table, [1, 2], session_id)
    table.extend_all()
    answer = table.open(PEER, opening([1], 4), 0.5)
    expect(answer, MessageVerdict.REJECTED, RefusalReason.FULL)
    assert answer.retry_after_ms > 0
    table.commit(PEER, commit_of([1, 2, 3], 2, 1), None, 0.9)
    expect(table.open(PEER, opening([1], 4), 1.2), MessageVerdict.ACCEPTED)
    assert {session.session_id for session in table} == {1, 3, 4}
    table.check()


def test_sessions_of_a_silent_peer_expire_and_others_stay(table: Table) -> None:
    started(table, [1, 2], 1)
    table.open(OTHER, opening([1, 2], 1), 0.0)
    table.extend_all()
    table.touch(PEER, 0.0)
    table.touch(OTHER, 9.0)
    assert [session.peer for session in table.expire(11.0)] == [PEER]
    assert table.drop_peer(OTHER) == 1
    assert table.pages.held_pages == 0


@pytest.mark.parametrize(
    "shape",
    [
        DraftShape(9, 1, 2),
        DraftShape(1, 9, 2),
        DraftShape(1, 1, 65),
        DraftShape(1, 0, 2),
        DraftShape(1, 1, 0),
    ],
)
def test_shapes_above_the_limits_are_rejected_and_the_session_lives(table: Table, shape: DraftShape) -> None:
    started(table, [1, 2])
    expect(
        table.commit(PEER, commit_of([1, 2, 3], 2), ask(shape=shape), 0.0),
        MessageVerdict.REJECTED,
        RefusalReason.SHAPE,
    )
    expect(table.commit(PEER, commit_of([1, 2, 3, 4], 3), ask(), 0.0), MessageVerdict.ACCEPTED)
    assert len(table.ready()) == 1


def test_cancel_forgets_the_asks_of_that_round(table: Table) -> None:
    started(table, [1, 2], 1)
    started(table, [1, 2], 2)
    table.commit(PEER, commit_of([1, 2, 3], 2, 1), ask(1), 0.0)
    table.commit(PEER, commit_of([1, 2, 3], 2, 2), ask(2), 0.0)
    assert table.cancel(PEER, 1) == 1
    assert [session.session_id for session in table.ready()] == [2]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (SequenceOpen(fence_of([1, 2]), [1, 3], 0, 0.0), RefusalReason.PREFIX_MISMATCH),
        (SequenceOpen(fence_of([1, 2]), [1, 2, 3], 0, 0.0), RefusalReason.MALFORMED),
        (SequenceOpen(fence_of([]), [], 0, 0.0), RefusalReason.MALFORMED),
        (opening([VOCAB]), RefusalReason.MALFORMED),
        (opening([1] * 61), RefusalReason.TOO_LONG),
    ],
)
def test_bad_openings_are_rejected(table: Table, bad: SequenceOpen, reason: RefusalReason) -> None:
    expect(table.open(PEER, bad, 0.0), MessageVerdict.REJECTED, reason)
    assert len(table) == 0


def test_a_drafter_without_features_is_ready_at_once() -> None:
    table = Table(SessionLimits(3, 60, VOCAB, 0, DraftShape(8, 8, 64), row_source=RowSource.NONE))
    table.open(PEER, opening([1, 2]), 0.0)
    table.commit(PEER, commit_of([1, 2, 3], 2, features=False), ask(), 0.0)
    assert len(table.ready()) == 1
    assert table.extendable() == []


def test_rows_behind_a_gap_are_bounded() -> None:
    features = FeatureQueue()
    assert features.add(10, torch.zeros(MAX_ROWS_AHEAD, WIDTH))
    assert not features.add(10 + MAX_ROWS_AHEAD, torch.zeros(1, WIDTH))
