"""Tests the scheduler as a state machine: no page is ever lost, and some sequence always advances."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from support.engine.scheduled import LIMITS, NUM_PAGES, PAGE_SIZE, execute, make_sequence

from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import OverloadedError
from outrider.shared.kv.pages import PageAllocator


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps, pauses and drops sequences in any order."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(PageAllocator(NUM_PAGES), PAGE_SIZE, LIMITS)
        self.next_id = 1

    @rule(
        target=live,
        prompt_len=st.integers(1, 20),
        max_new_tokens=st.integers(1, 14),
        max_nodes=st.sampled_from([1, 2, 5, 8]),
        priority=st.integers(-1, 1),
        token=st.sampled_from([2, 3, None]),
        salt=st.sampled_from(["", "other"]),
    )
    def submit(
        self,
        prompt_len: int,
        max_new_tokens: int,
        max_nodes: int,
        priority: int,
        token: int | None,
        salt: str,
    ) -> object:
        sequence = make_sequence(
            self.next_id, prompt_len, max_new_tokens, max_nodes, priority, token=token, salt=salt
        )
        assert sequence.max_len <= self.scheduler.capacity, (
            "the strategy must stay within what a server would admit"
        )
        try:
            self.scheduler.gate.enter(prompt_len)
        except OverloadedError:
            return multiple()
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    @rule(emit=st.integers(1, 8))
    def step(self, emit: int) -> None:
        could_advance = self.scheduler.has_work()
        before = [(sequence, sequence.committed_len, sequence.cached_len) for sequence in self.scheduler]
        plan = self.scheduler.schedule(0.0)
        finished = execute(self.scheduler, plan, emit)
        if could_advance:
            advanced = any(s.committed_len > tokens or s.cached_len > cached for s, tokens, cached in before)
            assert advanced or finished, "a step with work must make progress"

    @rule(sequence=live)
    def pause(self, sequence: Sequence) -> None:
        sequence.paused_at = 0.0

    @rule(sequence=live)
    def resume(self, sequence: Sequence) -> None:
        sequence.paused_at = None

    @rule()
    def flush(self) -> None:
        self.scheduler.prefixes.flush()

    @rule(sequence=live)
    def disown(self, sequence: Sequence) -> None:
        self.scheduler.disown(sequence)

    @rule()
    def change_draft(self) -> None:
        self.scheduler.prefixes.flush()
        for sequence in list(self.scheduler.active):
            self.scheduler.recompute(sequence)

    @rule(sequence=consumes(live))
    def drop(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence, 0.0)
        assert sequence.lease is None
        self.scheduler.release(sequence, 0.0)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check()
        assert len(self.scheduler.active) <= LIMITS.max_running
        slots = [sequence.slot for sequence in self.scheduler.active]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < LIMITS.max_running for slot in slots)
        assert all(sequence.slot == -1 for sequence in self.scheduler.waiting)
        queued = [sequence for sequence in self.scheduler.waiting if not sequence.resumptions]
        assert self.scheduler.gate.requests == len(queued)

    def teardown(self) -> None:
        for sequence in list(self.scheduler):
            sequence.paused_at = None
        for _ in range(5000):
            if not self.scheduler.has_work():
                break
            execute(self.scheduler, self.scheduler.schedule(0.0), 3)
        assert not list(self.scheduler), "everything must finish once nothing is paused"
        self.scheduler.check()
        assert self.scheduler.allocator.available_pages == NUM_PAGES
        self.scheduler.prefixes.flush()
        assert self.scheduler.allocator.free_pages == NUM_PAGES


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
