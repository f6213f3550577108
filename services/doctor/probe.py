"""Measures a pair's accept length (`--probe`), as configured and with the aux layers shifted by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.pair import Pair
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.heads.files.aux_layers import AUX_KEY
from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.services.draft.inproc import InprocDrafter
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.warmup import warm_up
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.request import (
    EngineRequest,
    Event,
    FailedEvent,
    FinishedEvent,
    SpeculationLimits,
)
from outrider.services.target.scheduling.limits import EngineLimits, SchedulerLimits
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.shared.attn.create import create_backend
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftShape

PAGE_SIZE = 16
BATCH = 8
BETTER = 1.03
"""Least ratio of accept lengths at which an alternative is recommended. Smaller gains may be due to
chance."""
USEFUL = 1.2
"""Minimum useful accept length. Below this length, drafting costs more time than it saves."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Accept length and speed of one run of `outrider doctor --probe` over all prompts.

    Attributes:
        variant: Name of the run: ``as configured``, ``aux layers -1`` or ``aux layers +1``.
        aux_layer_ids: Target layers whose outputs the draft received.
        named_ids: The ids with which the head's config.json would specify these target layers. None if
            config.json cannot specify these layers.
        accept_length: Average number of tokens per round, over rounds with draft nodes.
        rounds, tokens: Numbers of rounds and of generated tokens, over all prompts.
        seconds: Duration of the run.
    """

    variant: str
    aux_layer_ids: tuple[int, ...]
    named_ids: tuple[int, ...] | None
    accept_length: float
    rounds: int
    tokens: int
    seconds: float


def run_probe(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    shape: DraftShape,
) -> list[Measured]:
    """Load a target and a draft, and answer prompts greedily, once for each variant of the aux layers.

    Both steps show their progress.

    Args:
        pair: The target and the draft. There must be a drafting method.
        prompts: Prompts as token ids.
        num_tokens: Length of each answer, in tokens.
        shape: Shape of every draft tree.

    Raises:
        CheckpointError, ConfigurationError: The target or the draft cannot be loaded.
        OutriderError: A request failed.
    """
    decoder = load_pair_target(pair)
    room = max(len(prompt) for prompt in prompts) + num_tokens + shape.max_nodes + 2 * PAGE_SIZE
    engine, spec = load_draft(pair, decoder, room, shape)
    variants = list(_variants(spec, decoder))
    measured: list[Measured] = []
    with Progress("probe", len(variants), counts=False) as progress:
        for number, (name, one) in enumerate(variants):

            def answered(share: float, name: str = name, number: int = number) -> None:
                progress.tell(number + share, step=name)

            named = _named(pair, one)
            measured.append(
                _measure(name, decoder, engine, one, prompts, num_tokens, room, shape, named, answered)
            )
    return measured


def load_pair_target(pair: Pair) -> Decoder:
    """Load the target of a pair, and show the progress.

    Raises:
        CheckpointError, ConfigurationError: The target cannot be loaded.
    """
    with Progress("loading", counts=False) as progress:
        return load_decoder(pair.target, pair.device, pair.dtype, progress.tell)


def load_draft(
    pair: Pair, decoder: Decoder, room: int, shape: DraftShape, sequences: int = BATCH
) -> tuple[DraftEngine, FeatureSpec]:
    """Load a draft beside its target.

    Args:
        pair: The target and the draft. There must be a drafting method.
        decoder: The loaded target model.
        room: Largest number of tokens of a sequence.
        shape: Shape of the largest draft tree.
        sequences: Largest number of sequences at a time.

    Returns:
        The draft's engine for up to `sequences` sequences, and the features of the target that it reads.

    Raises:
        CheckpointError, ConfigurationError: The draft cannot be loaded.
    """
    settings = DraftSettings.load(
        {
            "draft": pair.draft,
            "target_weights": pair.target,
            "speculative_algorithm": pair.algorithm,
            "speculative_token_map": pair.token_map,
            "device": str(pair.device),
            "kv_tokens": sequences * (room + shape.topk * shape.depth + 16 * PAGE_SIZE),
        }
    )
    engine = build_engine(settings, pair.device, pair.dtype, pair.target_info)
    spec = engine.strategy.feature_spec(pair.target_info)
    for name in list(engine.strategy.missing()):
        engine.strategy.lend(name, decoder.weight(name))
    warm_up(engine, torch.device("cpu"))  # otherwise, the time of the first run would include compilation
    return engine, spec


def judge_probe(measured: Sequence[Measured]) -> Iterator[Finding]:
    """Report the measured accept length, and whether other aux layers would be better."""
    first, *others = measured
    numbers = (
        f"accept length {first.accept_length:.2f} over {first.rounds} rounds ({first.tokens} tokens, "
        f"{first.seconds:.1f} s)"
    )
    if first.accept_length < USEFUL:
        yield Finding.warning(
            "accept_length",
            numbers,
            "The draft predicts almost none of the target's tokens. It may be untrained, or made for another "
            "model.",
        )
    else:
        yield Finding.ok("accept_length", numbers)
    best = max(others, key=lambda one: one.accept_length, default=first)
    if best.accept_length > first.accept_length * BETTER:
        yield Finding.warning(
            AUX_KEY,
            f"outputs of layers {list(first.aux_layer_ids)} have accept length {first.accept_length:.2f}, "
            f"those of {list(best.aux_layer_ids)} have {best.accept_length:.2f}: you lose "
            f"{best.accept_length - first.accept_length:.2f}",
            f'Set "eagle_config": {{"{AUX_KEY}": {list(best.named_ids)}}} in the head\'s config.json.'
            if best.named_ids is not None
            else "A head's config.json cannot express these layers for this target: lists that start with 1 "
            "count outputs, others inputs.",
        )
    elif others:
        runs = ", ".join(f"{one.accept_length:.2f} with {one.variant}" for one in others)
        yield Finding.ok(
            AUX_KEY,
            f"measured accept length {first.accept_length:.2f} as configured, {runs}: no alternative is more "
            f"than {BETTER - 1:.0%} better",
        )


def probe_numbers(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the runs as a JSON object."""
    return {"runs": [asdict(one) for one in measured]}


def _variants(spec: FeatureSpec, decoder: Decoder) -> Iterator[tuple[str, FeatureSpec]]:
    yield "as configured", spec
    for shift in (-1, 1):
        ids = tuple(layer + shift for layer in spec.aux_layer_ids)
        if ids and ids[0] >= 0 and ids[-1] < decoder.config.num_layers:
            yield f"aux layers {shift:+d}", replace(spec, aux_layer_ids=ids)


def _named(pair: Pair, spec: FeatureSpec) -> tuple[int, ...] | None:
    """Return the ids by which the head's config would name the captured layers; () if none is captured."""
    outputs = tuple(spec.aux_layer_ids)
    return (
        Eagle3Config.parse(pair.draft_raw, pair.head_reader.source).aux_naming(outputs, pair.target_info)
        if outputs
        else ()
    )


class _Outcome:
    """An `EventSink` that collects finished and failed requests."""

    def __init__(self) -> None:
        self.finished: list[FinishedEvent] = []
        self.failed: list[FailedEvent] = []

    def deliver(self, events: Sequence[Event]) -> None:
        """Collect the final events of requests."""
        self.finished += [event for event in events if isinstance(event, FinishedEvent)]
        self.failed += [event for event in events if isinstance(event, FailedEvent)]


def _measure(
    name: str,
    decoder: Decoder,
    draft: DraftEngine,
    spec: FeatureSpec,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    room: int,
    shape: DraftShape,
    named_ids: tuple[int, ...] | None,
    answered: Callable[[float], None],
) -> Measured:
    limits = SpeculationLimits(shape)
    outcome = _Outcome()
    started = time.monotonic()
    with drafting(draft, spec, decoder) as drafter:
        pool = decoder.make_pool(BATCH * -(-room // PAGE_SIZE), PAGE_SIZE)
        runner = ModelRunner(decoder, pool, create_backend("auto", decoder.device))
        scheduler = Scheduler(
            pool.allocator, PAGE_SIZE, SchedulerLimits(max_running=BATCH, prefix_cache=False)
        )
        eos = frozenset(decoder.config.eos_token_ids)
        target = TargetEngine(runner, scheduler, drafter, EngineLimits(decoder.config.vocab_size, room, eos))
        for index, prompt in enumerate(prompts):
            speculation = limits.resolve(SpeculationMode.ON)
            request = EngineRequest(
                str(index), tuple(prompt), num_tokens, SamplingParams(temperature=0.0), speculation
            )
            target.submit(request, outcome)
        while target.has_work():
            target.step()
            answered(len(outcome.finished) / len(prompts))
    if outcome.failed:
        raise outcome.failed[0].error
    total = target.stats().speculation
    tokens = sum(event.completion_tokens for event in outcome.finished)
    return Measured(
        name,
        tuple(spec.aux_layer_ids),
        named_ids,
        total.accept_length,
        total.rounds,
        tokens,
        time.monotonic() - started,
    )


@contextmanager
def drafting(engine: DraftEngine, spec: FeatureSpec, decoder: Decoder) -> Iterator[InprocDrafter]:
    """Yield a drafter that runs the engine in this process. Shut it down at the end of the block."""
    drafter = InprocDrafter(engine, spec, decoder.device)
    try:
        yield drafter
    finally:
        drafter.shutdown()
