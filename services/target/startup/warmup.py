"""Warms up an engine before it serves, with short requests and with passes over longer prompts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.request import (
    EngineRequest,
    Event,
    EventSink,
    SpeculationLimits,
    SpeculationParams,
    TokensEvent,
)
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.services.target.startup.trial_sequences import WARM_UP_ROOM, release, trial_sequence
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.garbage import freeze_objects
from outrider.shared.base.generation import SamplingParams, SpeculationMode

REHEARSED_PROMPTS = ((300,), (2000,), (40, 50), (300, 400), (1,), (10,))
"""Rehearsed passes. Each entry contains the lengths of the prompts of one pass, in tokens."""
RUN_THROUGH_PROMPT = 48
RUN_THROUGH_TOKENS = 32
RUN_THROUGH_TIMEOUT_S = 5.0
SHAPE_TOKENS = 8
"""Largest number of rounds that measure a shape which mode `auto` may choose."""
SHAPES_TIME_S = 2.0
"""Time in seconds after which the measurements of further shapes are skipped."""

_log = logging.getLogger("outrider.target")


class _EndSink(EventSink):
    """An event sink that sets `ended` when a request has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def deliver(self, events: Seq[Event]) -> None:
        if any(not isinstance(event, TokensEvent) for event in events):
            self.ended.set()


@dataclass(frozen=True, slots=True)
class WarmUpRequest:
    """One request of the warm-up at startup.

    Attributes:
        speculation: Speculation mode and tree shape.
        temperature: Sampling temperature.
        tokens: Largest number of tokens of the answer.
        optional: True if the request is skipped when the warm-up takes long.
    """

    speculation: SpeculationParams
    temperature: float = 0.0
    tokens: int = RUN_THROUGH_TOKENS
    optional: bool = False


def run_through(engine: TargetEngine, limits: SpeculationLimits) -> None:
    """Run short requests through the running engine and its drafter, so that both are warm for real requests.

    The speculation controller keeps the costs that it learns, and all counters are reset. Objects that exist
    afterwards are exempted from garbage collection.
    """
    started = time.monotonic()
    for number, one in enumerate(warm_up_requests(limits, measures_shapes=not engine.recorder.enabled)):
        if one.optional and time.monotonic() - started > SHAPES_TIME_S:
            continue
        sink = _EndSink()
        length = min(RUN_THROUGH_PROMPT, engine.limits.max_model_len // 2)
        request = EngineRequest(
            request_id="warm-up",
            prompt_ids=[(7 + 13 * index) % engine.limits.vocab_size for index in range(length)],
            max_new_tokens=min(one.tokens, length),
            sampling=SamplingParams(temperature=one.temperature),
            speculation=one.speculation,
            ignore_eos=True,
            deadline=time.monotonic() + RUN_THROUGH_TIMEOUT_S,
            cache_salt=f"warm-up {number}",  # compute every prompt
        )
        try:
            engine.submit(request, sink)
        except InvalidRequestError:
            return  # a cold start does not matter with such a small pool
        sink.ended.wait(2 * RUN_THROUGH_TIMEOUT_S)
    engine.forget_warm_up()
    freeze_objects()


def warm_up_requests(limits: SpeculationLimits, *, measures_shapes: bool) -> list[WarmUpRequest]:
    """Return the requests of the warm-up at startup: greedy and sampled ones, with and without drafts.

    Args:
        limits: The server's limits on tree shapes.
        measures_shapes: True to add a request for each further tree shape that mode `auto` may choose.
            The rounds of these requests measure the cost of the shape. This is useless on a GPU, where these
            rounds become faster once their CUDA graphs are recorded.
    """
    auto, default = limits.resolve(SpeculationMode.AUTO), limits.resolve(SpeculationMode.ON)
    further = [
        WarmUpRequest(replace(default, shape=shape), tokens=SHAPE_TOKENS, optional=True)
        for shape in offered_shapes(auto.forms, 1)
        if shape != default.shape
    ]
    return [
        WarmUpRequest(default),
        WarmUpRequest(default, temperature=1.0),
        WarmUpRequest(limits.resolve(SpeculationMode.OFF)),
        *(further if measures_shapes else []),
        WarmUpRequest(auto),
    ]


def prompt_rehearsals(runner: ModelRunner) -> list[Callable[[], object]]:
    """Return passes over prompts, to find the kernels that prompts need.

    The passes are those of `REHEARSED_PROMPTS` that fit into the KV pool. `compile_kernels` rehearses the
    returned passes.
    """
    pool = runner.pool
    return [
        partial(_prefill_together, runner, lengths)
        for lengths in REHEARSED_PROMPTS
        if sum(pool.pages_for(length + WARM_UP_ROOM) for length in lengths) <= pool.num_pages
    ]


def _prefill_together(runner: ModelRunner, lengths: Seq[int]) -> None:
    sequences: list[Sequence] = []
    try:
        for index, length in enumerate(lengths):
            sequences.append(trial_sequence(runner, index, length))
            sequences[-1].wants_drafts = runner.captures
        runner.prefill(
            [PrefillChunk(sequence, 0, length) for sequence, length in zip(sequences, lengths, strict=True)]
        )
    finally:
        for sequence in sequences:
            release(sequence)
