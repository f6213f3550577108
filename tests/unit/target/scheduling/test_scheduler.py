"""Tests the scheduler as a state machine: no page is ever lost, and some sequence always advances."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from outrider.services.target.request import Event, GenerationRequest, SpeculationParams
from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.services.target.scheduling.queue_gate import QueueGate
from outrider.services.target.scheduling.scheduler import SPARE_TOKENS, Scheduler, StepPlan
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.base.errors import OverloadedError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.kv.pages import PageAllocator
from outrider.shared.spec.tree import DraftShape

NUM_PAGES = 12
PAGE_SIZE = 4
LIMITS = SchedulerLimits(max_running=4, max_queued=6, max_queued_tokens=60, prefill_chunk=7)


class NoSink:
    def deliver(self, events: Seq[Event]) -> None:
        """Discard the events."""


def make_sequence(
    session_id: int, prompt_len: int, max_new_tokens: int, max_nodes: int = 1, priority: int = 0
) -> Sequence:
    request = GenerationRequest(
        request_id=str(session_id),
        prompt_ids=[1] * prompt_len,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature=0.0),
        speculation=SpeculationParams(SpeculationMode.ON, DraftShape(4, 2, max_nodes)),
        priority=priority,
    )
    return Sequence(request, NoSink(), session_id=session_id, page_size=PAGE_SIZE, follow=True)


def execute(scheduler: Scheduler, plan: StepPlan, emit: int = 1) -> list[Sequence]:
    """Execute a plan as an engine would, with up to `emit` tokens per sequence. Return finished sequences."""
    finished = []
    for chunk in plan.prefills:
        sequence = chunk.sequence
        assert sequence.cached_len == chunk.start < chunk.stop <= sequence.committed_len
        sequence.cached_len = chunk.stop
        if chunk.stop == sequence.committed_len:
            sequence.tokens.append(2)
            sequence.status = SequenceStatus.RUNNING
    for sequence in plan.decodes:
        assert sequence.reserved_len >= sequence.cached_len + sequence.node_bound
        count = min(emit, sequence.node_bound, sequence.remaining)
        sequence.tokens.extend([2] * count)
        sequence.cached_len += count
    for sequence in list(scheduler.active):
        if sequence.status is SequenceStatus.RUNNING and sequence.remaining <= 0:
            scheduler.release(sequence, 0.0)
            finished.append(sequence)
    return finished


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
    )
    def submit(self, prompt_len: int, max_new_tokens: int, max_nodes: int, priority: int) -> object:
        sequence = make_sequence(self.next_id, prompt_len, max_new_tokens, max_nodes, priority)
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

    @rule(sequence=consumes(live))
    def drop(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence, 0.0)
        assert sequence.lease is None
        self.scheduler.release(sequence, 0.0)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check()
        assert len(self.scheduler.active) <= LIMITS.max_running
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
        assert self.scheduler.allocator.free_pages == NUM_PAGES


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_prompts_share_the_chunk_budget() -> None:
    scheduler = Scheduler(PageAllocator(64), PAGE_SIZE, SchedulerLimits(prefill_chunk=10))
    for session_id, prompt_len in ((1, 6), (2, 9)):
        scheduler.gate.enter(prompt_len)
        scheduler.add(make_sequence(session_id, prompt_len, 4))
    plan = scheduler.schedule(0.0)
    chunks = [(chunk.sequence.session_id, chunk.start, chunk.stop, chunk.is_last) for chunk in plan.prefills]
    assert chunks == [(1, 0, 6, True), (2, 0, 4, False)]
    execute(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.stop) for chunk in plan.prefills] == [(4, 9)]
    assert [sequence.session_id for sequence in plan.decodes] == [1], (
        "decoding must continue during a prefill"
    )


def test_higher_priority_is_admitted_first() -> None:
    scheduler = Scheduler(PageAllocator(64), PAGE_SIZE, SchedulerLimits(max_running=1))
    for session_id, priority in ((1, 0), (2, 0), (3, 5)):
        scheduler.gate.enter(4)
        scheduler.add(make_sequence(session_id, 4, 4, priority=priority))
    assert [sequence.session_id for sequence in scheduler.schedule(0.0).admitted] == [3]


def test_the_youngest_is_retracted_and_keeps_its_tokens() -> None:
    scheduler = Scheduler(PageAllocator(6), PAGE_SIZE, SchedulerLimits())
    for session_id in (1, 2):
        scheduler.gate.enter(6)
        scheduler.add(make_sequence(session_id, 6, 14))
        execute(scheduler, scheduler.schedule(0.0))
    for _ in range(20):
        plan = scheduler.schedule(0.0)
        if plan.retracted:
            break
        execute(scheduler, plan)
    assert [sequence.session_id for sequence in plan.retracted] == [2]
    (retracted,) = scheduler.waiting
    assert retracted.committed_len > 6
    assert (retracted.cached_len, retracted.lease) == (0, None)
    assert [sequence.session_id for sequence in plan.decodes] == [1]


def running(num_pages: int, prompts: Seq[int], max_new_tokens: int) -> tuple[Scheduler, list[Sequence]]:
    scheduler = Scheduler(PageAllocator(num_pages), PAGE_SIZE, SchedulerLimits())
    sequences = [
        make_sequence(session_id, prompt, max_new_tokens) for session_id, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.gate.enter(sequence.prompt_len)
        scheduler.add(sequence)
    execute(scheduler, scheduler.schedule(0.0))
    return scheduler, sequences


def test_with_plenty_of_pages_all_leases_of_a_batch_grow_together_and_rarely() -> None:
    scheduler, sequences = running(1000, [4, 5, 6], 300)
    grown = []
    for ahead in range(200):
        before = [len(sequence.lease.pages) for sequence in sequences if sequence.lease]
        assert scheduler.reserve_all_ahead(
            [(sequence, sequence.committed_len + ahead) for sequence in sequences]
        )
        after = [len(sequence.lease.pages) for sequence in sequences if sequence.lease]
        if before != after:
            assert all(now > then for now, then in zip(after, before, strict=True)), "all must grow together"
            grown.append(ahead)
        assert all(one.reserved_len >= one.committed_len + ahead + one.node_bound for one in sequences)
        scheduler.check()
    assert 200 // SPARE_TOKENS <= len(grown) <= 200 // SPARE_TOKENS + 1


def test_no_lease_grows_beyond_the_maximum_of_its_sequence() -> None:
    scheduler, sequences = running(1000, [4], 9)
    assert scheduler.reserve_all_ahead([(sequences[0], sequences[0].committed_len + 4)])
    assert sequences[0].reserved_len < sequences[0].max_len + PAGE_SIZE
    scheduler.check()


def test_with_few_pages_leases_grow_only_as_needed() -> None:
    scheduler, sequences = running(8, [4, 5], 300)
    assert scheduler.reserve_all_ahead([(sequence, sequence.committed_len + 4) for sequence in sequences])
    assert [len(sequence.lease.pages) for sequence in sequences if sequence.lease] == [3, 3]
    assert not scheduler.reserve_all_ahead(
        [(sequence, sequence.committed_len + 20) for sequence in sequences]
    )
    scheduler.check()


def test_the_gate_bounds_requests_and_prompt_tokens() -> None:
    gate = QueueGate(SchedulerLimits(max_queued=2, max_queued_tokens=100))
    gate.enter(60)
    with pytest.raises(OverloadedError) as tokens:
        gate.enter(60)
    assert tokens.value.retry_after_s == 1.0
    gate.enter(30)
    with pytest.raises(OverloadedError):
        gate.enter(1)
    gate.leave(60, 1.0)
    gate.leave(30, 5.0)
    gate.enter(1000)
    assert gate.requests == 1, "a single prompt may be longer than the queue's bound"
    with pytest.raises(OverloadedError) as rate:
        gate.enter(1)
    assert rate.value.retry_after_s == 2.0, "half of the queue, at the measured four seconds per request"
