"""Sequences with a slot and pages, for tests of the slot table and of packed rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.services.target.request import EngineRequest, SpeculationParams
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogprobParams
from outrider.shared.base.token_states import NO_STATES, StateParams
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import DraftShape
from support.engine.target_harness import Collector

TREE = DraftShape(3, 2, 7)


def seated_sequence(
    pool: KVPool,
    session_id: int,
    slot: int,
    *,
    prompt: Seq[int] = (3, 1, 4, 1, 5),
    room: int = 8,
    max_new_tokens: int = 20,
    sampling: SamplingParams | None = None,
    shape: DraftShape = TREE,
    trace: bool = False,
    follow: bool = True,
    states: StateParams = NO_STATES,
    logprobs: LogprobParams = NO_LOGPROBS,
) -> Sequence:
    """Return a running sequence with a whole prompt in the cache.

    Args:
        pool: Pool from which the pages come.
        session_id: Id of the sequence.
        slot: Slot of the sequence. Its residence there is 1.
        prompt: Tokens of the prompt.
        room: Number of tokens after the prompt for which there are pages.
        max_new_tokens: The sequence's length limit.
        sampling: Sampling parameters; greedy by default.
        shape: The tree that the request asks for.
        trace: Whether the client wants a trace.
        follow: Whether a drafter may follow the sequence.
        states: The states of tokens that the client wants.
        logprobs: The logprobs that the client wants.
    """
    request = EngineRequest(
        request_id=str(session_id),
        prompt_ids=tuple(prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingParams(temperature=0.0),
        speculation=SpeculationParams(SpeculationMode.ON, shape, trace=trace),
        states=states,
        logprobs=logprobs,
    )
    sequence = Sequence(request, Collector(), session_id=session_id, page_size=pool.page_size, follow=follow)
    sequence.lease = pool.lease(len(prompt) + room)
    assert sequence.lease is not None, "the test's pool must be large enough"
    sequence.status = SequenceStatus.RUNNING
    sequence.slot, sequence.residence = slot, 1
    sequence.cached_len = len(prompt)
    return sequence
