"""The target's time limits for a silent draft, with a clock that advances only while the target waits."""

from __future__ import annotations

import pytest
from support.connection.clocked_draft import CAP_S, FAULT_S, ROUND_S, Target

from outrider.services.target.draft_client.breaker import BreakerState
from outrider.services.target.draft_client.remote_drafter import FAULTS_TO_RECONNECT


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    return Target(monkeypatch)


def test_a_stopped_draft_is_waited_for_once_by_each_new_request(target: Target) -> None:
    for session_id in range(3):
        target.open(session_id)
        for _round in range(100):
            target.round()
    assert target.connection.frames == 300
    assert target.connection.waited_s == pytest.approx(3 * CAP_S)


def test_a_stopped_draft_is_found_faulty_though_nobody_waits(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    target.open(1)
    while target.clock.now < 100.0 + FAULT_S:
        assert target.link.breaker.state is BreakerState.CLOSED
        target.round()
    target.round()
    assert target.link.breaker.refuses_all
    assert "has owed an answer" in caplog.text
    assert target.drafter.backing_off
    frames = target.connection.frames
    for _round in range(100):
        target.round()
    assert target.connection.frames == frames, "a faulty draft receives nothing"
    assert target.connection.waited_s <= CAP_S + 1e-9


def test_requests_shorter_than_the_fault_deadline_find_a_stopped_draft_faulty_too(target: Target) -> None:
    """Otherwise each round would send another request, and requests would pile up."""
    for session_id in range(8):
        target.open(session_id)
        for _round in range(100):
            target.round()
        del target.fences[session_id]
        target.drafter.close([session_id])
    assert target.link.breaker.refuses_all
    assert target.connection.frames < (FAULT_S + 3 * CAP_S) / ROUND_S
    assert target.connection.waited_s <= 8 * CAP_S + 1e-9


def test_a_slow_opening_is_not_waited_for_and_drafting_begins_behind_it(target: Target) -> None:
    target.open(1)
    for _round in range(50):
        assert target.round() == [1]
    target.say(target.fences[1])  # an old round's answer: the draft has computed the prompt
    target.round()
    waited = target.connection.waited_s
    assert waited <= 2 * CAP_S + 1e-9
    assert target.round(answer=True) == [3]
    target.round()
    assert target.connection.waited_s > waited, "the next round waits again, as long as that pays off"


def test_an_opening_that_takes_long_while_the_draft_lives_is_no_fault(target: Target) -> None:
    target.open(1)
    while target.clock.now < 100.0 + 4 * FAULT_S:
        target.round()
        target.connection.last_sign_s = target.clock.now
    assert target.link.breaker.state is BreakerState.CLOSED
    assert target.connection.waited_s <= CAP_S + 1e-9


def test_an_answer_that_was_there_already_closes_the_breaker(target: Target) -> None:
    target.open(1)
    target.link.breaker.trip(0.0)
    target.link.breaker.sign_of_life(target.clock.now)
    assert not target.link.breaker.refuses_all
    target.open(1, epoch=2)
    assert target.round(answer=True) == [3]
    assert target.link.breaker.state is BreakerState.CLOSED
    assert target.link.breaker.faults == 0


def test_faults_in_a_row_end_the_connection(target: Target) -> None:
    for fault in range(FAULTS_TO_RECONNECT):
        assert not target.connection.ended.is_set()
        target.open(1, epoch=fault + 1)
        target.round(must_wait=True)
        target.clock.now += 100.0
        target.link.breaker.sign_of_life(target.clock.now)
    assert target.connection.ended.is_set()
    assert target.link.breaker.faults == FAULTS_TO_RECONNECT
