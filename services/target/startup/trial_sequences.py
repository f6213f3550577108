"""Sequences of synthetic tokens for warm-up passes over the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.request import EngineRequest, Event, EventSink, SpeculationParams
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.spec.tree import NO_DRAFT

PROMPT_LEN = 9
WARM_UP_ROOM = 18
"""Number of KV slots of a trial sequence in addition to its prompt."""


class _NoSink(EventSink):
    def deliver(self, events: Seq[Event]) -> None:
        """Discard the events."""


def trial_sequence(runner: ModelRunner, attempt: int, length: int = PROMPT_LEN) -> Sequence:
    """Return a sequence for a check at startup, with a page lease and a prompt of `length` tokens.

    `attempt` selects the tokens of the prompt.

    Raises:
        OutriderError: The KV cache is too small.
    """
    vocab_size = runner.decoder.config.vocab_size
    request = EngineRequest(
        request_id="warm-up",
        prompt_ids=[(7 + 13 * index + 31 * attempt) % vocab_size for index in range(length)],
        max_new_tokens=1 << 16,
        sampling=SamplingParams(temperature=0.0),
        speculation=SpeculationParams(SpeculationMode.OFF, NO_DRAFT),
        ignore_eos=True,
    )
    sequence = Sequence(request, _NoSink(), session_id=0, page_size=runner.pool.page_size)
    sequence.lease = runner.pool.lease(length + WARM_UP_ROOM)
    if sequence.lease is None:
        raise OutriderError(
            "The KV cache is too small for the warm-up; raise --kv-tokens.", field="kv_tokens"
        )
    return sequence


def release(sequence: Sequence) -> None:
    """Free the pages of a trial sequence."""
    if sequence.lease is not None:
        sequence.lease.release()
        sequence.lease = None
