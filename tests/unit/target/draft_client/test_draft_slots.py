"""Slots at a remote draft: joins, reports and leaves on the wire; refusals, late trees, ended connections."""

from __future__ import annotations

import pytest
from support.connection.clocked_slots import COLUMNS, FAULT_S, SHAPE, SIZE
from support.connection.clocked_slots import DraftSlots as Draft

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client import remote_slots
from outrider.services.target.draft_client.breaker import CAPACITY_S, SHARE, BreakerState
from outrider.services.target.draft_client.round_waits import FIRST_PAUSE_S, GOOD_ROUNDS
from outrider.shared.spec.drafter import AWAITED
from outrider.shared.spec.tree import DraftShape


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> Draft:
    return Draft(monkeypatch)


def test_sessions_join_are_reported_and_leave(draft: Draft) -> None:
    for session_id in (7, 8):
        draft.open(session_id)
    # 1. Both join.
    first = draft.round(7, 8)
    assert first is not None
    slots = {join.session_id: join.slot for join in draft.last.joins}
    assert set(slots) == {7, 8}
    (group,) = draft.last.groups
    assert (list(group.slots), list(group.committed_upper)) == ([slots[7], slots[8]], [9, 9])
    # 2. One is told of the round, and the other one leaves.
    draft.slots.chosen(7, first.number, 6, [11, 12])
    draft.slots.chosen(8, first.number, 6, [13])
    draft.slots.left([8])
    draft.slots.chosen(8, 0, 7, [14])  # in a commit, because the session has left
    second = draft.round(7)
    assert second is not None
    assert second.number > first.number
    told = [(one.slot, one.number, one.base_len, list(one.token_ids)) for one in draft.last.update.told]
    assert told == [(slots[7], first.number, 6, [11, 12]), (slots[8], first.number, 6, [13])]
    assert list(draft.last.update.left) == [slots[8]]
    assert not draft.last.joins
    # 3. Nothing is sent twice.
    draft.round(7)
    assert not draft.last.update.told
    draft.slots.flush()
    assert draft.kinds == ["slots_open"]


def test_a_report_precedes_the_commits_of_joining_sessions(draft: Draft) -> None:
    draft.open(7)
    first = draft.round(7)
    assert first is not None
    draft.slots.chosen(7, first.number, 6, [11])
    draft.slots.left([7])
    session = draft.sessions[7]
    session.base_len, session.token_ids = 6, [11, 12]
    draft.round(7)
    assert draft.kinds == ["slots_open", "slots_update", "frame"]
    (commit,) = draft.sent[-1].frame.commits
    assert (commit.base_len, list(commit.token_ids), commit.want) == (6, [11, 12], draft_pb2.WANT_NOTHING)
    assert not session.token_ids
    assert [join.session_id for join in draft.last.joins] == [7]


def test_a_session_that_was_lost_or_opened_again_has_no_slot(draft: Draft) -> None:
    for session_id in (7, 8):
        draft.open(session_id)
    first = draft.round(7, 8)
    assert first is not None
    draft.sessions[7].lose("resync")
    second = draft.round(7, 8)
    assert second is not None
    assert list(second.refused) == [7]
    assert len(draft.last.groups[0].slots) == 1
    draft.open(7, epoch=2)
    draft.slots.chosen(7, first.number, 6, [11])
    draft.round(7, 8)
    assert [(join.session_id, join.epoch) for join in draft.last.joins] == [(7, 2)]
    assert not draft.last.update.told


def test_a_session_waits_for_the_report_of_its_rows(draft: Draft) -> None:
    session = draft.open(7, ready=False)
    assert draft.slots.obstacle(7, SHAPE, must_wait=False) == "warming"
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == AWAITED
    draft.report(7, epoch=2)
    draft.now += FAULT_S - 0.1
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == AWAITED
    draft.report(7)
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == ""
    assert not draft.faults
    assert draft.slots.obstacle(7, DraftShape(6, 1, 7), must_wait=True) == "shape_above_draft"
    assert draft.slots.obstacle(9, SHAPE, must_wait=True) == "not_followed"
    session.lose("resync")
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == "resync"
    draft.breaker.trip(draft.now)
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == "backing_off"


def test_a_draft_that_never_reports_is_faulty_after_the_deadline(draft: Draft) -> None:
    draft.open(7, ready=False)
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == AWAITED
    draft.now += FAULT_S
    assert draft.slots.obstacle(7, SHAPE, must_wait=True) == "warming"
    assert draft.faults == [FAULT_S]


@pytest.mark.parametrize("limit_s", [None, 0.5])
def test_late_trees_end_the_series_and_open_its_sessions_again(draft: Draft, limit_s: float | None) -> None:
    for session_id in (7, 8, 9):
        draft.open(session_id)
    draft.round(7, 8, limit_s=limit_s)
    series = draft.last.rounds
    draft.channel.broken = True
    assert not draft.is_open
    assert draft.faults == ([FAULT_S] if limit_s is None else [])
    if limit_s is not None:  # the wait of other rows used up the budget
        empty_s = (limit_s - CAPACITY_S) / SHARE
        assert draft.breaker.budget.empty_s(draft.now) == pytest.approx(empty_s)
        assert draft.breaker.state is BreakerState.OPEN
        draft.now += empty_s
        draft.breaker.success(draft.now)
    assert [draft.sessions[one].lost for one in (7, 8, 9)] == [True, True, False]
    draft.slots.flush()
    assert draft.kinds == ["slots_open"], "nothing of the old series is sent"
    # The next series begins after a pause, when the old waits are over.
    draft.now += FIRST_PAUSE_S
    assert draft.is_open
    draft.channel.broken, draft.channel.mends = True, False
    assert not draft.slots.fits([SIZE])
    draft.channel.mends = True
    draft.open(7, epoch=2)
    draft.round(7)
    assert draft.last.rounds > series
    assert len(draft.last.joins) == 1


def test_pauses_grow_until_rounds_were_in_time(draft: Draft) -> None:
    pauses = []
    for epoch in range(1, 9):
        draft.open(7, epoch=epoch)
        draft.round(7)
        ended = draft_pb2.RoundsEnded(rounds=draft.last.rounds, reason="busy")
        draft.slots.hear(draft_pb2.SessionReply(rounds_ended=ended))
        pause = next(step for step in range(1, 100) if open_after(draft, step / 10))
        pauses.append(pause / 10)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    draft.open(7, epoch=9)
    for _ in range(GOOD_ROUNDS):
        started = draft.round(7)
        assert started is not None
        draft.slots.measure(started.number, 0.001)
    draft.channel.broken = True
    assert not draft.is_open
    assert open_after(draft, FIRST_PAUSE_S)


def open_after(draft: Draft, seconds: float) -> bool:
    """Return True if rounds may begin `seconds` after now, and wait until then in this case."""
    before, draft.now = draft.now, draft.now + seconds + 1e-6
    if draft.is_open:
        return True
    draft.now = before
    return False


def test_the_end_of_an_earlier_series_is_ignored(draft: Draft) -> None:
    draft.open(7)
    draft.round(7)
    ended = draft_pb2.RoundsEnded(rounds=draft.last.rounds - 1, reason="late")
    draft.slots.hear(draft_pb2.SessionReply(rounds_ended=ended))
    assert draft.is_open
    assert draft.sessions[7].live


def test_an_ended_connection_is_no_late_round(draft: Draft) -> None:
    draft.open(7)
    draft.round(7)
    draft.connection.close()
    draft.channel.broken = True
    assert not draft.is_open
    assert not draft.faults
    draft.slots.lost()
    draft.channel.broken = False
    draft.connection = draft.connect()
    draft.slots.connected(draft.connection)
    assert not draft.is_open, "the draft has not accepted the slots"
    draft.accept()
    assert draft.is_open


def test_a_draft_that_refuses_slots_or_has_no_room_is_left_to_the_host(draft: Draft) -> None:
    draft.channel.room = False
    assert not draft.slots.fits([SIZE])
    draft.accept("no_rounds")
    assert not draft.is_open


def test_a_faulty_draft_exchanges_no_round(draft: Draft) -> None:
    draft.breaker.trip(draft.now)
    assert not draft.is_open
    draft.breaker.reset()
    assert draft.is_open


def test_the_first_round_of_a_combination_of_sizes_may_take_longer(draft: Draft) -> None:
    draft.open(7)
    for _ in range(2):
        draft.round(7, limit_s=0.01)
    draft.round(7, limit_s=60.0)
    assert draft.channel.limits == [remote_slots.FIRST_LIMIT_S, 0.01, FAULT_S]


def test_recorded_sizes_are_announced_to_every_draft(draft: Draft) -> None:
    for _ in range(2):
        draft.slots.record(SIZE, SHAPE)
    assert draft.kinds == ["slots_open", "rounds_prepare"]
    size = draft.sent[-1].rounds_prepare
    assert (size.batch, size.columns, size.shape.max_nodes) == (2, COLUMNS, SHAPE.max_nodes)
    draft.slots.connected(draft.connection)
    assert draft.kinds[2:] == ["slots_open", "rounds_prepare"]


def test_numbers_start_again_over_a_new_connection(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_slots, "MAX_ROUND_NUMBER", 3)
    draft.open(7)
    for number in (2, 3):
        assert draft.is_open
        draft.round(7)
        assert draft.last.number == number
    assert not draft.is_open
    assert draft.connection.ended.is_set()
    draft.connection = draft.connect()
    draft.slots.connected(draft.connection)
    draft.accept()
    draft.open(7)
    assert draft.is_open
    draft.round(7)
    assert draft.last.number == 2
