"""Builds an in-process engine with random weights, in the same way as `outrider serve target`.

Only a few modules of `bench` depend on how the services are built: this module, `draft_stack`, `remote_draft`
and `kernels.inputs`. All other modules only measure the engines and inputs that these modules create.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.bench.stacks.answers import AnswerSink, TimedAnswer
from outrider.bench.stacks.random_fit import check_shape_fits
from outrider.bench.stacks.random_head import memory_folder, write_random_head
from outrider.bench.stacks.random_target import MAKING, random_target
from outrider.bench.stacks.remote_draft import DraftTransport, RemoteDraft
from outrider.bench.stacks.shapes import NamedShape
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.stack.supervisor import Surroundings
from outrider.services.target.app import StandIn, Target
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance, rates_of_mean
from outrider.services.target.parallel.group import start_group
from outrider.services.target.request import EngineRequest
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.kv.pool import CacheSizing
from outrider.shared.nn.decoder import Decoder, default_dtype
from outrider.shared.obs.progress import Waiting
from outrider.shared.spec.drafter import DrafterState
from outrider.shared.spec.tree import DraftShape

DRAFT_START_S = 120.0
ANSWER_S = 120.0
NO_DRAFT = "none"
PREFILL_TOKENS = 16384
"""Maximum number of prompt tokens in a step. The peers' runs used the same `max_num_batched_tokens`."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an in-process engine for benchmarks.

    Attributes:
        shape: Named sizes of the target and the head.
        device, dtype: Device and dtype of the target, in the service's notation.
        draft_device: Device of the draft if the draft has its own process.
        transport: Connection between the target and the draft.
        max_batch: Maximum number of concurrent sequences.
        max_len: Maximum length of a prompt and its answer together, in tokens.
        trees: Tree shapes of the rounds.
        tp: Number of tensor-parallel ranks of the target.
        around: Environment variables and callbacks of the draft's process, if the draft has its own process.
        settings: Further settings of the target, as a mapping from name to text. They override all other
            settings.
    """

    shape: NamedShape
    device: str
    dtype: str
    transport: DraftTransport
    max_batch: int
    max_len: int
    trees: Sequence[DraftShape] = ()
    draft_device: str | None = None
    tp: int = 1
    around: Surroundings = field(default_factory=Surroundings)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """True if there is a draft."""
        return bool(self.trees)

    @property
    def draft_is_apart(self) -> bool:
        """True if the draft has its own process."""
        return self.drafts and self.transport is not DraftTransport.INPROC


Taken = tuple[float, list[TimedAnswer]]
"""The seconds that a batch took, and the answers of its sequences."""


class BenchEngine:
    """A running engine. Created by `running_engine`."""

    def __init__(self, target: Target, decoder: Decoder, synthetic: SyntheticAcceptance) -> None:
        self.decoder = decoder
        self.synthetic = synthetic
        self._target = target
        self._limits = target.serving.limits
        self._batches = 0

    @property
    def device(self) -> torch.device:
        """Device of the target. If the target has several devices, the first device."""
        return self.decoder.device

    @property
    def graphs(self) -> int:
        """Number of CUDA graphs that the target has captured so far, for steps and rounds."""
        return self._target.recorded_graphs

    def set_accept_length(self, accept_length: float) -> str:
        """Set the mean accept length of all following rounds. Returns a label of this acceptance."""
        return self.set_rates(rates_of_mean(accept_length))

    def set_rates(self, rates: Sequence[float]) -> str:
        """Set the acceptance rate of each position. Returns a label of this acceptance."""
        self.synthetic.set_rates(rates)
        return self.synthetic.describe()

    def forget(self) -> None:
        """Let `auto` forget what it has learned of the drafter. Call only while no batch is answered."""
        self._target.engine.forget_warm_up()

    def auto_decision(self) -> dict[str, Any]:
        """Return the last decision of `auto` as JSON values."""
        verdict = self._target.engine.controller.verdict
        speedup = verdict.speedup
        return {
            "reason": verdict.reason.value,
            "rows": verdict.text,
            "estimated_speedup": None if speedup is None else round(speedup, 3),
        }

    def run_batch(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int | Sequence[int],
        tree: DraftShape | None,
        mode: SpeculationMode | None = None,
        seed: int | None = None,
    ) -> Taken:
        """Answer all prompts as one batch, and wait for the answers (`start_batch`, `RunningBatch.wait`)."""
        return self.start_batch(prompts, new_tokens, tree, mode, seed).wait()

    def start_batch(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int | Sequence[int],
        tree: DraftShape | None,
        mode: SpeculationMode | None = None,
        seed: int | None = None,
    ) -> RunningBatch:
        """Submit prompts as one batch. Each answer is greedy and has exactly `new_tokens` tokens.

        Args:
            prompts: Token ids of each prompt.
            new_tokens: Length of all answers, or a list with the length of each answer.
            tree: Tree shape of every round. With None, decoding is plain.
            mode: Speculation mode of the requests. The default is `ON` if `tree` is given, and `OFF`
                otherwise. With `AUTO`, `tree` is ignored, and the settings of the engine limit the shapes.
            seed: Seed of the first request; each further request adds 1. The seeds determine how many draft
                tokens are accepted at each position. The default is a new seed for each batch.
        """
        sink = AnswerSink(len(prompts))
        engine = self._target.engine
        mode = mode or (SpeculationMode.ON if tree else SpeculationMode.OFF)
        shape = tree or DraftShape(1, 1, 1)
        speculation = (
            self._limits.resolve(mode)
            if mode is SpeculationMode.AUTO
            else self._limits.resolve(mode, depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes)
        )
        lengths = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        self._batches += 1
        first_seed = 1000 * self._batches if seed is None else seed
        wake, engine.wake = engine.wake, lambda: None  # let the first step see the whole batch
        try:
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                request = EngineRequest(
                    request_id=str(index),
                    prompt_ids=prompt,
                    max_new_tokens=length,
                    sampling=SamplingParams(temperature=0.0, seed=first_seed + index),
                    speculation=speculation,
                    ignore_eos=True,
                )
                engine.submit(request, sink)
        finally:
            engine.wake = wake
        sink.started = time.perf_counter()
        engine.wake()
        return RunningBatch(sink)


class RunningBatch:
    """A batch that is being answered. Created by `BenchEngine.start_batch`."""

    def __init__(self, sink: AnswerSink) -> None:
        self._sink = sink

    def wait(self) -> Taken:
        """Wait for the last token of the batch, and return the duration and the answers.

        Returns:
            The seconds from submitting the batch to its last token, and the answer of each sequence.

        Raises:
            OutriderError: A request failed.
            UnavailableError: The engine does not answer.
        """
        sink = self._sink
        self._until(sink.done.wait)
        return sink.ended - sink.started, [sink.answer(str(index)) for index in range(sink.requests)]

    def wait_for_steps(self, steps: int) -> None:
        """Wait until every sequence has received tokens in `steps` more steps, or until a sequence has ended.

        The prefill counts as one of the steps.

        Raises:
            OutriderError: A request failed.
            UnavailableError: The engine does not answer.
        """
        sink = self._sink
        with sink.stepped:
            wanted = sink.fewest_steps + steps
            self._until(
                partial(sink.stepped.wait_for, lambda: sink.fewest_steps >= wanted or sink.some_ended)
            )

    def _until(self, wait: Callable[[float], bool]) -> None:
        if not wait(ANSWER_S):
            raise UnavailableError(f"The engine did not answer within {ANSWER_S:.0f} s.")
        if self._sink.error is not None:
            raise self._sink.error


@contextmanager
def running_engine(options: EngineOptions) -> Iterator[BenchEngine]:
    """Context manager that creates a target, starts its draft and its engine, and stops them on exit.

    Raises:
        ConfigurationError: A setting is wrong, or the model does not fit into the device's memory.
        UnavailableError: The draft did not start.
    """
    log: deque[str] = deque(maxlen=30)
    with ExitStack() as cleanup:
        settings = _settings(options, NO_DRAFT)
        device, dtype = target_placement(options)
        check_shape_fits(
            options.shape,
            device,
            dtype,
            with_head=options.drafts and options.draft_device in (None, str(device)),
            ranks=settings.tp,
        )
        decoder = _decoder(cleanup, options, settings, device, dtype)
        synthetic = SyntheticAcceptance(rates_of_mean(1.0), decoder.config.vocab_size, device)
        make_drafter = None
        if options.drafts:
            head = _head_folder(cleanup, options.shape, device, dtype)
            if options.transport is DraftTransport.INPROC:
                draft = _draft_settings(settings, head)

                def make_drafter(model: Decoder, sizing: CacheSizing) -> Any:
                    return drafter_beside(model, draft, sizing)
            else:
                settings = _settings(options, _start_draft(cleanup, options, settings, head, dtype, log))
        target = Target(settings, make_drafter, StandIn(decoder, synthetic))
        cleanup.callback(target.shutdown)
        with Waiting("waiting for the draft"):
            asyncio.run(target.wait_for_draft(DRAFT_START_S))
        state = target.drafter.state()
        if options.drafts and state is not DrafterState.ON:
            raise UnavailableError(
                f"The draft is {state.value} after {DRAFT_START_S:.0f} s. Its last output:\n" + "\n".join(log)
            )
        # Wait until the server has finished its work for idle times, which would disturb the measurements.
        with Waiting("recording what the engine records while it is idle"):
            asyncio.run(target.wait_recorded(for_all=True))
        yield BenchEngine(target, decoder, synthetic)


def check_accept_length(accept_length: float) -> None:
    """Check that synthetic acceptance supports this mean accept length.

    Raises:
        ConfigurationError: The length is out of range.
    """
    rates_of_mean(accept_length)


def target_placement(options: EngineOptions) -> tuple[torch.device, torch.dtype]:
    """Return the target's device and dtype.

    Raises:
        ConfigurationError: A setting is wrong, or this machine has no such device.
    """
    settings = _settings(options, NO_DRAFT)
    settings.check()
    device = settings.torch_device()
    return device, settings.torch_dtype() or default_dtype(device)


def _decoder(
    cleanup: ExitStack,
    options: EngineOptions,
    settings: TargetSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> Decoder:
    if settings.tp == 1:
        return random_target(options.shape, device, dtype)
    with Waiting(MAKING):
        ranks = start_group(settings, random=options.shape.target)
    cleanup.callback(ranks.close)
    return ranks.decoder


def _settings(options: EngineOptions, draft: str) -> TargetSettings:
    given: dict[str, Any] = {
        "model": options.shape.name,
        "device": options.device,
        "dtype": options.dtype,
        "max_running_requests": options.max_batch,
        "max_model_len": options.max_len,
        "prefill_chunk": PREFILL_TOKENS,
        "tp": options.tp,
        "draft": draft,
        "draft_fault_deadline_s": 60.0,
        "disable_prefix_cache": True,  # Prompts are measured several times, and must be computed each time.
        "log_level": "warning",
    }
    if options.trees:
        deepest, widest = max(tree.depth for tree in options.trees), max(tree.topk for tree in options.trees)
        given |= {
            "num_steps": deepest,
            "topk": widest,
            "num_draft_tokens": max(tree.max_nodes for tree in options.trees),
        }
    return TargetSettings.load({**given, **options.settings})


def _head_folder(cleanup: ExitStack, shape: NamedShape, device: torch.device, dtype: torch.dtype) -> Path:
    folder = tempfile.mkdtemp(prefix="outrider-head-", dir=memory_folder())
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return write_random_head(Path(folder), shape, device, dtype)


def _draft_settings(settings: TargetSettings, head: Path) -> DraftSettings:
    caps = {name: getattr(settings, name) for name in ("max_steps", "max_topk", "max_nodes", "page_size")}
    return DraftSettings.load({"draft": head, "max_sessions": settings.running_requests, **caps})


def _start_draft(
    cleanup: ExitStack,
    options: EngineOptions,
    settings: TargetSettings,
    head: Path,
    dtype: torch.dtype,
    log: deque[str],
) -> str:
    """Start `outrider serve draft` and return its address."""
    draft = RemoteDraft(
        head=head,
        transport=options.transport,
        device=options.draft_device or str(settings.torch_device()),
        dtype=str(dtype).removeprefix("torch."),
        kv_tokens=options.max_batch
        * (options.max_len + settings.max_steps * settings.max_topk + settings.page_size),
        max_sessions=max(options.max_batch, 16),
    )
    return draft.start(cleanup, options.around, log)


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``name=value`` pairs into a dictionary.

    Raises:
        ConfigurationError: A pair has no ``=``.
    """
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ConfigurationError(
            f"--set {wrong[0]}: expected NAME=VALUE for a setting of `outrider serve target`.", field="--set"
        )
    return {
        name.strip().replace("-", "_"): value for name, _, value in (pair.partition("=") for pair in pairs)
    }
