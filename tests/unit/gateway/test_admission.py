"""Admission control: limits in sequences and prompt tokens, and correct counts in every order of events."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.services.gateway.admission import Admission, Slot
from outrider.shared.base.errors import OverloadedError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_limits_and_the_error() -> None:
    admission = Admission(2, 100, Clock())
    with admission.admit(2) as slot:
        slot.add_prompts([30, 30])
        with pytest.raises(OverloadedError, match="limit 2") as caught:
            admission.admit(1)
        assert caught.value.retry_after_s >= 1
        slot.started(0)
        with admission.admit(1) as other:
            with pytest.raises(OverloadedError, match="limit 100"):
                other.add_prompts([71])
            other.add_prompts([70])
    assert (admission.waiting, admission.waiting_tokens, admission.active) == (0, 0, 0)


def test_a_key_leaves_room_in_the_queue_for_others() -> None:
    admission = Admission(8, 80, Clock())
    with ExitStack() as slots:
        first = [slots.enter_context(admission.admit(2, "flood")) for _ in range(3)]
        with pytest.raises(OverloadedError, match="6 sequences of this API key"):
            admission.admit(1, "flood")
        first[0].add_prompts([32, 32])
        with pytest.raises(OverloadedError, match="64 prompt tokens of this API key"):
            first[1].add_prompts([5, 5])
        light = slots.enter_context(admission.admit(1, "light"))
        light.add_prompts([10])
        slots.enter_context(admission.admit(1))
    assert (admission.waiting, admission.waiting_tokens) == (0, 0)
    assert admission._waiting_of == admission._tokens_of == {}
    with ExitStack() as slots:
        # Without keys, one party may fill the whole queue.
        for _ in range(8):
            slots.enter_context(admission.admit(1))


def test_a_request_larger_than_the_limits_runs_alone() -> None:
    admission = Admission(2, 100, Clock())
    with admission.admit(16) as slot:
        slot.add_prompts([1000] * 16)
        with pytest.raises(OverloadedError):
            admission.admit(1)


def test_retry_after_follows_the_measured_drain_rate() -> None:
    clock = Clock()
    admission = Admission(100, 10**6, clock)
    with admission.admit(41) as slot:
        slot.add_prompts([1] * 41)
        assert admission.retry_after_s() == 21
        for index in range(21):
            clock.now += 0.5
            slot.started(index)
        assert admission.waiting == 20
        assert admission.retry_after_s() == 5
    assert admission.retry_after_s() == 1


def _drained(admission: Admission, clock: Clock, interval_s: float) -> None:
    """Let ten sequences leave a busy queue at equal intervals."""
    with admission.admit(11) as slot:
        slot.add_prompts([1] * 11)
        for index in range(10):
            clock.now += interval_s
            slot.started(index)
        clock.now += interval_s
        slot.started(10)


def test_a_request_that_would_wait_too_long_is_refused() -> None:
    clock = Clock()
    admission = Admission(100, 10**6, clock, max_wait_s=3.0)
    with admission.admit(50) as slot:  # the speed of the queue is not known yet
        slot.add_prompts([1] * 50)
        with admission.admit(40):
            pass
    _drained(admission, clock, 0.5)
    with ExitStack() as slots:
        slots.enter_context(admission.admit(5))
        slots.enter_context(admission.admit(1))
        with pytest.raises(OverloadedError, match=r"in about 3\.5 s \(limit 3\.0 s\)") as caught:
            admission.admit(1)
        assert caught.value.retry_after_s == 2
        slots.enter_context(admission.admit(1, priority=1))
    clock.now += 1000  # a time without a queue says nothing about its speed
    with admission.admit(5), admission.admit(1):
        pass


def test_sequences_in_free_slots_do_not_wait() -> None:
    """After a busy queue, its speed says nothing about sequences that find a slot at once."""
    clock = Clock()
    admission = Admission(100, 10**6, clock, max_wait_s=1.0, slots=lambda: 16)
    _drained(admission, clock, 0.5)
    with ExitStack() as slots:
        for _ in range(16 + 2):  # the last two of them wait for slots
            slots.enter_context(admission.admit(1))
        with pytest.raises(OverloadedError, match=r"about 1\.5 s"):
            admission.admit(1)


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    clock = Clock()
    admission = Admission(100, 10**6, clock)
    _drained(admission, clock, 0.5)
    with admission.admit(10):
        with admission.admit(1, deadline_s=6.0):
            pass
        with pytest.raises(OverloadedError, match=r"limit 4\.0 s"):
            admission.admit(1, deadline_s=4.0)


def test_a_key_with_few_requests_does_not_wait_for_a_flood() -> None:
    clock = Clock()
    admission = Admission(100, 10**6, clock, max_wait_s=3.0)
    _drained(admission, clock, 0.5)
    with ExitStack() as slots:
        slots.enter_context(admission.admit(20, "flood"))
        with pytest.raises(OverloadedError, match="about 10"):
            admission.admit(1, "flood")
        slots.enter_context(admission.admit(2, "light"))
        slots.enter_context(admission.admit(1, "light"))
        with pytest.raises(OverloadedError, match="about 3"):  # three of its own and three of the other key
            admission.admit(1, "light")


def test_a_queue_that_stands_still_counts_as_slow() -> None:
    clock = Clock()
    admission = Admission(100, 10**6, clock, max_wait_s=3.0)
    with admission.admit(20) as slot:
        slot.add_prompts([1] * 20)
        for index in range(15):
            clock.now += 0.1
            slot.started(index)
        with admission.admit(1):
            pass
        clock.now += 30
        with pytest.raises(OverloadedError, match="first token"):
            admission.admit(1)


class AdmissionMachine(RuleBasedStateMachine):
    """Requests arrive, start, end and fail in any order. The counts always match those of a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(8, 50, Clock())
        self.open: list[tuple[Slot, list[int], set[int]]] = []

    @rule(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4))
    def admit(self, lengths: list[int]) -> None:
        waiting = self.admission.waiting
        try:
            slot = self.admission.admit(len(lengths))
        except OverloadedError:
            assert waiting + len(lengths) > 8
            return
        tokens = self.admission.waiting_tokens
        try:
            slot.__enter__().add_prompts(lengths)
        except OverloadedError:
            assert tokens + sum(lengths) > 50
            slot.__exit__(None, None, None)
            return
        self.open.append((slot, lengths, set(range(len(lengths)))))

    @rule(which=st.integers(0, 100), index=st.integers(0, 3))
    def start(self, which: int, index: int) -> None:
        if self.open:
            slot, _, waiting = self.open[which % len(self.open)]
            slot.started(index)
            waiting.discard(index)

    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        if self.open:
            slot, _, _ = self.open.pop(which % len(self.open))
            slot.__exit__(None, None, None)

    @invariant()
    def counts_are_right(self) -> None:
        assert self.admission.waiting == sum(len(waiting) for _, _, waiting in self.open)
        assert self.admission.waiting_tokens == sum(
            lengths[index] for _, lengths, waiting in self.open for index in waiting
        )
        assert self.admission.active == sum(len(lengths) for _, lengths, _ in self.open)


TestAdmissionMachine = AdmissionMachine.TestCase
