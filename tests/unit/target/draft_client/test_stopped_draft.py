"""Laws: a draft that is stopped, once or again and again, holds up only rows in mode `on`, and not for long.

The clock advances only while the target waits and by the time of rounds, so waits can be added up.
"""

from __future__ import annotations

from functools import partial

import pytest
from support.connection import clocked_draft
from support.connection.clocked_draft import CAP_S, FAULT_S, ROUND_S, SHAPE, Pulsing, Target

from outrider.services.target.draft_client.answer_times import (
    ANSWERS_TO_JUDGE,
    FLOOR_SHARE,
    OTHERS_FLOOR_S,
    OTHERS_MULTIPLE,
    AnswerTimes,
)
from outrider.services.target.draft_client.breaker import (
    CAPACITY_S,
    OPENING_CAPACITY_S,
    OPENING_SHARE,
    SHARE,
    BreakerState,
)
from outrider.services.target.draft_client.deadlines import TURN_S
from outrider.services.target.draft_client.wait_budget import WaitBudget
from outrider.shared.spec.drafter import AWAITED, ProposalRequest, ProposalRow

ANSWER_S = 0.004
SECONDS = 60.0
ON, AUTO = 1, 2
BATCHES, BATCH_S = 10, 8.0
BUSY_CAP_S = 0.1
"""Longest wait of a row in mode `auto` on a machine that is busy with other work, in seconds."""
PULSES = [(0.9, 1.0), (0.3, 0.4), (2.5, 3.0)]
"""Seconds for which the draft is stopped, and seconds of a period. `reliability` measurements use these."""


def running(monkeypatch: pytest.MonkeyPatch, stopped_s: float, period_s: float, *sessions: int) -> Target:
    target = Target(monkeypatch, partial(Pulsing, answer_s=ANSWER_S, stopped_s=stopped_s, period_s=period_s))
    for session_id in sessions:
        target.open(session_id)
    return target


def run_warm(target: Target, *on: int) -> None:
    """Run rounds until the waits follow measured times."""
    assert target.mixed_round(on=set(on)).isdisjoint(on), "no other row waits for the first trees"
    for _round in range(2 * ANSWERS_TO_JUDGE):
        assert target.mixed_round(on=set(on)) == set(target.fences)
    target.connection.waited_s = 0.0


def waits_in_vain(target: Target, seconds: float) -> float:
    """Run rounds for a time. Return the seconds of the waits that lasted longer than an answer takes."""
    in_vain_s, began = 0.0, target.clock.now
    while target.clock.now < began + seconds:
        target.reopen()
        before = target.connection.waited_s
        target.mixed_round(on={ON})
        waited_s = target.connection.waited_s - before
        if waited_s > ANSWER_S + 1e-9:
            in_vain_s += waited_s
    return in_vain_s


@pytest.mark.parametrize(("stopped_s", "period_s"), PULSES)
@pytest.mark.parametrize("sessions", [(AUTO,), (ON,), (ON, AUTO)])
def test_a_draft_that_stops_again_and_again_costs_other_rows_a_small_share(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float, period_s: float, sessions: tuple[int, ...]
) -> None:
    target = running(monkeypatch, stopped_s, period_s, *sessions)
    in_vain_s = waits_in_vain(target, SECONDS)
    capacity_s = CAPACITY_S + OPENING_CAPACITY_S
    assert in_vain_s <= SECONDS * (SHARE + OPENING_SHARE) + capacity_s + FLOOR_SHARE * FAULT_S
    assert in_vain_s / SECONDS < 0.03, "the rows beside a stopped draft keep 97 % of their speed"


@pytest.mark.parametrize("calm_s", [0.0, 10.0])
@pytest.mark.parametrize(("stopped_s", "period_s"), PULSES)
def test_requests_on_a_busy_machine_lose_little_to_a_draft_that_stops(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float, period_s: float, calm_s: float
) -> None:
    """Answers and waits take long on such a machine. Each request opens a session of its own."""
    target = running(monkeypatch, stopped_s, period_s)
    monkeypatch.setattr(clocked_draft, "CAP_S", BUSY_CAP_S)
    for _answer in range(2 * ANSWERS_TO_JUDGE):
        target.drafter._deadlines.times.in_time(BUSY_CAP_S / 2, target.clock.now)
    in_vain_s = 0.0
    for batch in range(BATCHES):
        target.clock.now += calm_s
        for request in range(4):
            target.open(4 * batch + request)
            in_vain_s += waits_in_vain(target, BATCH_S / 8)
        in_vain_s += waits_in_vain(target, BATCH_S / 2)
        target.drafter.close(list(target.fences))
        target.fences.clear()
    assert in_vain_s / (BATCHES * BATCH_S) <= 0.025


@pytest.mark.parametrize("saved_s", [0.001, 0.05])
@pytest.mark.parametrize(("stopped_s", "period_s"), PULSES)
def test_a_draft_that_stops_again_and_again_never_loses_more_than_it_saves(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float, period_s: float, saved_s: float
) -> None:
    """The budget for waits includes the time that trees have saved."""
    target = running(monkeypatch, stopped_s, period_s, AUTO)
    in_vain_s, all_saved_s, began = 0.0, 0.0, target.clock.now
    while target.clock.now < began + SECONDS:
        target.reopen()
        before = target.connection.waited_s
        target.mixed_round(on=set())
        if not target.drafter.fallback_reason(AUTO):
            target.drafter.saved(saved_s)
            all_saved_s += saved_s
        waited_s = target.connection.waited_s - before
        if waited_s > ANSWER_S + 1e-9:
            in_vain_s += waited_s
    assert all_saved_s > 0
    assert (in_vain_s - all_saved_s) / SECONDS < 0.05


@pytest.mark.parametrize(("stopped_s", "period_s"), PULSES)
def test_a_row_of_mode_on_keeps_most_of_its_speed(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float, period_s: float
) -> None:
    target = running(monkeypatch, stopped_s, period_s, ON)
    rounds = taken = 0
    began = target.clock.now
    while target.clock.now < began + SECONDS:
        target.reopen()
        taken += ON in target.mixed_round(on={ON})
        rounds += 1
    assert taken / rounds > 0.8, "a row that waits in vain is given up soon, and the draft is left alone"


def test_a_stopped_draft_delays_one_round_and_gives_the_row_up_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = running(monkeypatch, 0.0, 1.0, ON)
    run_warm(target, ON)
    connection = target.connection
    assert isinstance(connection, Pulsing)
    connection.stopped_s = connection.period_s = 1e9
    others_s = max(OTHERS_FLOOR_S, OTHERS_MULTIPLE * ANSWER_S)
    began = target.clock.now
    assert target.mixed_round(on={ON}) == set(), "the round goes on without the row"
    assert connection.waited_s == pytest.approx(others_s)
    waited = 1
    while not target.mixed_round(on={ON}):
        waited += 1
    limit_s = FLOOR_SHARE * FAULT_S
    assert connection.waited_s == pytest.approx(others_s), "later rounds do not wait"
    assert target.clock.now - began == pytest.approx(limit_s, abs=3 * ROUND_S)
    assert waited == pytest.approx((limit_s - others_s) / ROUND_S, abs=3)
    assert target.drafter.fallback_reason(ON) == "late"
    assert target.link.breaker.refuses_all, "no further row waits until the draft shows life"


def test_a_row_alone_waits_in_turns_so_that_the_engine_can_look_for_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = running(monkeypatch, 0.0, 1.0, ON)
    run_warm(target, ON)
    connection = target.connection
    assert isinstance(connection, Pulsing)
    connection.answer_s = 2.5 * TURN_S
    frames = connection.frames
    request = ProposalRequest(1, [ProposalRow(target.fences[ON], 7, SHAPE, must_wait=True)], None)
    for _turn in range(2):
        before = target.clock.now
        assert target.drafter.propose(request).num_nodes.tolist() == [1]
        assert target.drafter.fallback_reason(ON) == AWAITED
        assert target.clock.now - before == pytest.approx(TURN_S)
    assert target.drafter.propose(request).num_nodes.tolist() == [3]
    assert connection.frames == frames + 1, "the tree is requested once"


def test_a_row_whose_session_is_lost_while_it_awaits_its_tree_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = running(monkeypatch, 0.0, 1.0, ON)
    run_warm(target, ON)
    connection = target.connection
    assert isinstance(connection, Pulsing)
    connection.stopped_s = connection.period_s = 1e9
    assert target.mixed_round(on={ON}) == set()
    target.drafter._sessions[ON].lose()
    assert target.mixed_round(on={ON}) == {ON}
    assert target.drafter.fallback_reason(ON) == "resync"


def test_answers_to_rows_of_mode_on_do_not_bring_back_a_draft_that_is_too_slow_for_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = running(monkeypatch, 0.0, 1.0, ON, AUTO)
    connection = target.connection
    assert isinstance(connection, Pulsing)
    connection.answer_s = 3 * CAP_S
    began, missed = target.clock.now, 0
    while target.clock.now < began + SECONDS:
        target.mixed_round(on={ON})
        missed += target.drafter.fallback_reason(AUTO) == "late" and (
            target.link.breaker.state is not BreakerState.OPEN
        )
    assert missed * CAP_S <= SECONDS * SHARE + CAPACITY_S


def test_a_budget_grows_with_time_up_to_its_capacity() -> None:
    budget = WaitBudget(share=0.1, capacity_s=1.0)
    assert budget.empty_s(0.0) == 0.0
    budget.spend(1.5, 0.0)
    assert budget.empty_s(0.0) == pytest.approx(5.0)
    assert budget.empty_s(3.0) == pytest.approx(2.0)
    assert budget.empty_s(6.0) == 0.0
    assert budget.empty_s(1000.0) == 0.0
    budget.spend(1.1, 1000.0)
    assert budget.empty_s(1000.0) == pytest.approx(1.0), "a long calm adds no more than the capacity"


def test_a_budget_does_not_grow_while_it_is_paused() -> None:
    budget = WaitBudget(share=0.1, capacity_s=1.0)
    budget.spend(1.5, 0.0)
    budget.pause(1.0)
    budget.resume(1000.0)
    assert budget.empty_s(1000.0) == pytest.approx(4.0)
    assert budget.empty_s(1003.0) == pytest.approx(1.0)


def test_saved_time_fills_the_budget_up_to_its_capacity() -> None:
    budget = WaitBudget(share=0.01, capacity_s=0.2)
    budget.spend(0.5, 0.0)
    assert budget.empty_s(0.0) == pytest.approx(30.0)
    budget.earn(0.2, 0.0)
    assert budget.empty_s(0.0) == pytest.approx(10.0)
    budget.earn(9.0, 0.0)
    assert budget.empty_s(0.0) == 0.0
    budget.spend(0.3, 0.0)
    assert budget.empty_s(0.0) == pytest.approx(10.0), "savings add no more than the capacity"


@pytest.mark.parametrize(("saved_s", "drafts"), [(0.02, True), (0.0, False)])
def test_a_draft_that_saves_more_than_its_late_answers_cost_remains_in_use(
    monkeypatch: pytest.MonkeyPatch, saved_s: float, drafts: bool
) -> None:
    """Every fifth answer is late."""
    target = running(monkeypatch, 0.0, 1.0, AUTO)
    run_warm(target)
    connection = target.connection
    assert isinstance(connection, Pulsing)
    taken = 0
    for number in range(1000):
        connection.answer_s = 3 * CAP_S if number % 5 == 4 else ANSWER_S
        if AUTO in target.mixed_round(on=set()) and not target.drafter.fallback_reason(AUTO):
            taken += 1
            target.drafter.saved(saved_s)
        target.reopen()
    assert (taken > 550) is drafts, taken


class Answers(AnswerTimes):
    """Answers to requests that are sent one after the other."""

    def __init__(self) -> None:
        super().__init__(fault_deadline_s=2.0)
        self.now = 0.0

    def arrive(self, *answers: float, late: bool = False) -> None:
        """Record answers that have taken these times, in seconds."""
        for seconds in answers:
            self.now += seconds
            (self.late if late else self.in_time)(seconds, self.now)


def test_waits_follow_the_99th_percentile_between_a_floor_and_the_fault_deadline() -> None:
    times = Answers()
    times.arrive(*[0.001] * (ANSWERS_TO_JUDGE - 1))
    assert times.limit_s == 2.0, "too few answers to judge"
    times.arrive(0.001)
    assert (times.limit_s, times.others_s, times.exchange_s) == (0.25, 0.01, 0.05)
    times.arrive(0.008)
    assert (times.limit_s, times.others_s, times.exchange_s) == (0.25, 0.016, 0.05)
    slow = Answers()
    slow.arrive(*[0.2] * ANSWERS_TO_JUDGE)
    assert (slow.limit_s, slow.others_s, slow.exchange_s) == (0.8, 0.4, 0.4)
    slow.arrive(0.8)
    assert (slow.limit_s, slow.others_s, slow.exchange_s) == (2.0, 1.6, 1.6)


def test_an_answer_that_arrives_after_a_stall_makes_no_wait_longer() -> None:
    times = Answers()
    times.arrive(0.2, *[0.004] * 8, 0.3, *[0.004] * 20)
    assert times.median == times.p99 == 0.004
    times.arrive(*[0.05, 0.2, 0.004] * 200)
    assert times.p99 == 0.004
    times.arrive(*[0.05] * 6)
    assert times.p99 == 0.05, "several slow answers in a row show that the draft has become slower"


def test_one_stall_that_delays_several_answers_counts_once() -> None:
    times = Answers()
    times.arrive(*[0.004] * 20)
    for _stall in range(50):
        times.now += 0.2
        for seconds in (0.2, 0.2, 0.19, 0.18):
            times.in_time(seconds, times.now)
        times.arrive(0.004)
    assert times.p99 == 0.004


def test_only_late_answers_in_a_row_make_waits_longer() -> None:
    times = Answers()
    times.arrive(*[0.001] * 100)
    for _period in range(100):
        times.arrive(0.9, late=True)
        times.arrive(0.001)
    assert times.limit_s == 0.25, "a draft that stops now and then is not a slow draft"
    times.arrive(*[0.3] * 6, late=True)
    assert times.limit_s == pytest.approx(1.2), "a draft that became slower is waited for longer"
