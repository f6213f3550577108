"""Tests the scheduler: chunks, priorities, retraction, growth of leases, and the queue's limits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from support.engine.scheduled import LIMITS, PAGE_SIZE, execute, make_sequence

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.services.target.scheduling.queue_gate import QueueGate
from outrider.services.target.scheduling.scheduler import SPARE_TOKENS, Scheduler
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.base.errors import OverloadedError
from outrider.shared.kv.pages import PageAllocator


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


def test_with_plenty_of_pages_leases_grow_rarely() -> None:
    scheduler, sequences = running(1000, [4, 5, 6], 300)
    grown = [0] * len(sequences)
    for ahead in range(200):
        for index, sequence in enumerate(sequences):
            assert sequence.lease is not None
            before = len(sequence.lease.pages)
            assert scheduler.reserve_ahead(sequence, sequence.committed_len + ahead)
            grown[index] += len(sequence.lease.pages) > before
        assert all(one.reserved_len >= one.committed_len + ahead + one.node_bound for one in sequences)
        scheduler.check()
    assert all(200 // SPARE_TOKENS <= count <= 200 // SPARE_TOKENS + 1 for count in grown)


def test_no_lease_grows_beyond_the_maximum_of_its_sequence() -> None:
    scheduler, sequences = running(1000, [4], 9)
    assert scheduler.reserve_ahead(sequences[0], sequences[0].committed_len + 4)
    assert sequences[0].reserved_len < sequences[0].max_len + PAGE_SIZE
    scheduler.check()


def test_with_few_pages_leases_grow_only_as_needed() -> None:
    scheduler, sequences = running(8, [4, 5], 300)
    for sequence in sequences:
        assert scheduler.reserve_ahead(sequence, sequence.committed_len + 4)
    assert [len(sequence.lease.pages) for sequence in sequences if sequence.lease] == [3, 3]
    assert not scheduler.reserve_ahead(sequences[0], sequences[0].committed_len + 20)
    scheduler.check()


def submit(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.gate.enter(sequence.prompt_len)
        scheduler.add(sequence)


def test_a_slot_is_owned_from_admission_to_the_end_and_reused() -> None:
    scheduler = Scheduler(PageAllocator(64), PAGE_SIZE, SchedulerLimits(max_running=2))
    first, second, third = (make_sequence(session_id, 4, 40) for session_id in (1, 2, 3))
    submit(scheduler, first, second, third)
    execute(scheduler, scheduler.schedule(0.0))
    assert {first.slot, second.slot} == {0, 1}
    assert third.slot == -1
    assert first.residence == second.residence == 1
    left = first.slot
    scheduler.release(first, 0.0)
    assert first.slot == -1
    scheduler.schedule(0.0)
    assert third.slot == left
    scheduler.release(first, 0.0)
    assert third.slot == left, "a second release must not free the slot of the next owner"


def test_every_return_to_a_slot_is_a_new_residence() -> None:
    scheduler = Scheduler(PageAllocator(6), PAGE_SIZE, SchedulerLimits())
    old, young = (make_sequence(session_id, 6, 14) for session_id in (1, 2))
    for sequence in (old, young):
        submit(scheduler, sequence)
        execute(scheduler, scheduler.schedule(0.0))
    assert (old.residence, young.residence) == (1, 1)
    while not (plan := scheduler.schedule(0.0)).retracted:
        execute(scheduler, plan)
    assert plan.retracted == [young]
    assert young.slot == -1
    execute(scheduler, plan)
    while young.slot < 0:
        execute(scheduler, scheduler.schedule(0.0))
    assert (old.residence, young.residence) == (1, 2)


def test_the_results_in_flight_of_a_recomputed_sequence_are_void() -> None:
    scheduler, (sequence,) = running(64, [4], 30)
    slot = sequence.slot
    sequence.tokens_ahead, sequence.passes_ahead = 5, 1
    scheduler.prefixes.flush()
    scheduler.recompute(sequence)
    assert sequence.slot == slot
    assert sequence.residence == 2
    assert (sequence.tokens_ahead, sequence.passes_ahead, sequence.cached_len) == (0, 0, 0)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.stop) for chunk in plan.prefills] == [(0, 5)]
    assert not plan.decodes


def test_a_released_sequence_has_nothing_in_flight() -> None:
    scheduler, (sequence,) = running(64, [4], 30)
    sequence.tokens_ahead, sequence.passes_ahead = 5, 1
    scheduler.release(sequence, 0.0)
    assert (sequence.tokens_ahead, sequence.passes_ahead) == (0, 0)


def test_pages_cover_what_the_passes_in_flight_may_add() -> None:
    scheduler, (sequence,) = running(64, [4], 300)
    sequence.tokens_ahead, sequence.passes_ahead = 100, 1
    assert sequence.committed_upper == 5 + 100
    assert scheduler.schedule(0.0).decodes == [sequence]
    assert sequence.reserved_len >= 105 + sequence.node_bound
    sequence.tokens_ahead = 1000
    assert sequence.committed_upper == sequence.end_len == 304


def test_a_sequence_whose_last_token_is_in_flight_does_not_decode() -> None:
    scheduler, (sequence,) = running(64, [4], 3)
    assert sequence.remaining == 2
    sequence.passes_ahead = sequence.tokens_ahead = 1
    assert scheduler.decoding() == scheduler.schedule(0.0).decodes == [sequence]
    sequence.passes_ahead = sequence.tokens_ahead = 2
    assert scheduler.decoding() == scheduler.schedule(0.0).decodes == []


def test_the_prompt_budget_applies_only_beside_decoding_sequences() -> None:
    scheduler = Scheduler(PageAllocator(64), PAGE_SIZE, SchedulerLimits(prefill_chunk=50))
    submit(scheduler, make_sequence(1, 30, 20))
    plan = scheduler.schedule(0.0, 8)
    assert [(chunk.start, chunk.stop) for chunk in plan.prefills] == [(0, 30)], "nobody waits for a token"
    execute(scheduler, plan)
    submit(scheduler, make_sequence(2, 20, 20), make_sequence(3, 20, 20))
    spans = []
    for _ in range(3):
        plan = scheduler.schedule(0.0, 8)
        assert next(sequence.session_id for sequence in plan.decodes) == 1
        spans.append([(chunk.sequence.session_id, chunk.start, chunk.stop) for chunk in plan.prefills])
        execute(scheduler, plan)
    assert spans == [[(2, 0, 8)], [(2, 8, 16)], [(2, 16, 20), (3, 0, 4)]]
    plan = scheduler.schedule(0.0, 1000)
    assert [(chunk.start, chunk.stop) for chunk in plan.prefills] == [(4, 20)]


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


@pytest.mark.parametrize("num_paused", [1, 3])
def test_paused_sequences_give_their_slots_to_those_that_wait(num_paused: int) -> None:
    """One sequence goes on all the time. Before, paused ones were retracted only if all were paused."""
    scheduler = Scheduler(PageAllocator(64), PAGE_SIZE, LIMITS)
    first = [make_sequence(number, 4, 20) for number in range(LIMITS.max_running)]
    for sequence in first:
        scheduler.gate.enter(sequence.prompt_len)
        scheduler.add(sequence)
    while not all(sequence.status is SequenceStatus.RUNNING for sequence in first):
        execute(scheduler, scheduler.schedule(0.0))
    for sequence in first[1 : 1 + num_paused]:
        sequence.paused_at = 0.0
    late = [make_sequence(10 + number, 4, 20) for number in range(num_paused)]
    for sequence in late:
        scheduler.gate.enter(sequence.prompt_len)
        scheduler.add(sequence)
    plan = scheduler.schedule(0.0)
    assert plan.admitted == late
    assert set(plan.retracted) == set(first[1 : 1 + num_paused])
    assert first[0] in scheduler.active
    assert scheduler.num_retractions == num_paused
    scheduler.check()


def test_paused_sequences_keep_their_slots_while_nobody_waits() -> None:
    scheduler = Scheduler(PageAllocator(64), PAGE_SIZE, LIMITS)
    sequence = make_sequence(1, 4, 20)
    scheduler.gate.enter(4)
    scheduler.add(sequence)
    execute(scheduler, scheduler.schedule(0.0))
    sequence.paused_at = 0.0
    assert not scheduler.schedule(0.0).retracted
    assert sequence in scheduler.active
