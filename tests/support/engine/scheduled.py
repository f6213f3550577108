"""Sequences for a scheduler without an engine, and the execution of its plans."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.services.target.request import EngineRequest, Event, SpeculationParams
from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.services.target.scheduling.scheduler import Scheduler, StepPlan
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.spec.tree import DraftShape

NUM_PAGES = 12
PAGE_SIZE = 4
LIMITS = SchedulerLimits(max_running=4, max_queued=6, max_queued_tokens=60, prefill_chunk=7)


class NoSink:
    def deliver(self, events: Seq[Event]) -> None:
        """Discard the events."""


def make_sequence(
    session_id: int,
    prompt_len: int,
    max_new_tokens: int,
    max_nodes: int = 1,
    priority: int = 0,
    *,
    token: int | None = None,
    salt: str = "",
) -> Sequence:
    """Make a sequence whose prompt repeats one token, by default a token that no other sequence has."""
    request = EngineRequest(
        request_id=str(session_id),
        prompt_ids=[100 + session_id if token is None else token] * prompt_len,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature=0.0),
        speculation=SpeculationParams(SpeculationMode.ON, DraftShape(4, 2, max_nodes)),
        priority=priority,
        cache_salt=salt,
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
