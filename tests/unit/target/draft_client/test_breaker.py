"""The circuit breaker, with a fake clock: back-offs after one or several faults, and across connections."""

from __future__ import annotations

from outrider.services.target.draft_client.breaker import (
    FIRST_BACKOFF_S,
    LAST_FAULTY_BACKOFF,
    LAST_SLOW_BACKOFF_S,
    Breaker,
    BreakerState,
)

DEADLINE_S = 2.0


def asked_again_after(breaker: Breaker, now: float) -> float:
    """Return the time at which the back-off ends, found by bisection. The breaker is half-open afterwards."""
    assert breaker.state is BreakerState.OPEN
    early, late = now, now + 1000.0
    while late - early > 1e-6:
        middle = (early + late) / 2
        early, late = (early, middle) if breaker.wants_probe(middle) else (middle, late)
    breaker.sign_of_life(late)
    assert not breaker.wants_probe(late), "a half-open breaker needs no ping"
    return late


def test_a_draft_that_answers_pings_alone_costs_a_tenth_at_most() -> None:
    breaker, now, waited = Breaker(DEADLINE_S), 0.0, 0.0
    for _fault in range(40):
        now += DEADLINE_S
        waited += DEADLINE_S
        breaker.trip(now)
        now = asked_again_after(breaker, now)
    assert breaker.faults == 40
    assert waited / now < 0.11
    assert asked_after_one_more(breaker, now) <= LAST_FAULTY_BACKOFF * DEADLINE_S + 1e-3


def asked_after_one_more(breaker: Breaker, now: float) -> float:
    breaker.trip(now)
    return asked_again_after(breaker, now) - now


def test_one_fault_is_forgiven_at_once_and_an_answer_forgives_all() -> None:
    breaker = Breaker(DEADLINE_S)
    assert asked_after_one_more(breaker, 0.0) <= FIRST_BACKOFF_S + 1e-3
    assert asked_after_one_more(breaker, 10.0) >= DEADLINE_S
    breaker.success(15.0)
    assert breaker.state is BreakerState.CLOSED
    assert asked_after_one_more(breaker, 20.0) <= FIRST_BACKOFF_S + 1e-3


def test_a_new_connection_is_tried_and_forgets_no_fault() -> None:
    breaker = Breaker(DEADLINE_S)
    for moment in (0.0, 10.0, 20.0):
        breaker.trip(moment)
    breaker.reset()
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.refuses_all
    assert asked_after_one_more(breaker, 30.0) > 4 * DEADLINE_S


def test_a_slow_draft_is_asked_again_soon() -> None:
    breaker = Breaker(DEADLINE_S)
    for _miss in range(3):
        assert breaker.state is BreakerState.CLOSED
        breaker.miss(0.0)
    now = 0.0
    for _try in range(5):
        now = asked_again_after(breaker, now)
        breaker.miss(now)
    assert asked_again_after(breaker, now) - now <= LAST_SLOW_BACKOFF_S + 1e-3
    assert not breaker.faulty
