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
