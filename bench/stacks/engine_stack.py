"""An engine in this process, as `outrider serve target` builds it, over random weights: the model, its draft, and batches through both.

What the services are made of is known here and where single parts of them are set up (`draft_stack`, `remote_draft`, the inputs of
kernels); the other modules measure what these offer.
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
from outrider.bench.stacks.random_head import memory_folder, write_random_head
from outrider.bench.stacks.random_target import random_target
from outrider.bench.stacks.remote_draft import DraftTransport, RemoteDraft
from outrider.bench.stacks.shapes import NamedShape
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.stack.option_checks import DEVICE
from outrider.services.stack.supervisor import Surroundings
from outrider.services.target.app import StandIn, Target
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance, rates_of_mean
from outrider.services.target.parallel.group import start_group
from outrider.services.target.request import GenerationRequest
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.kv.pool import CacheSizing
from outrider.shared.nn.decoder import Decoder, default_dtype
from outrider.shared.spec.drafter import DrafterState
from outrider.shared.spec.tree import DraftShape

DRAFT_START_S = 120.0
ANSWER_S = 120.0
NO_DRAFT = "none"
PREFILL_TOKENS = 16384
"""Most prompt tokens of a step, the `max_num_batched_tokens` of the peers' runs that figures are compared with."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to build.

    Attributes:
        shape: Of target and head.
        device, dtype: Of the target, as the service takes them.
        draft_device: Of the draft, where it runs apart.
        transport: How it is reached.
        max_batch: Sequences at once.
        max_len: Longest prompt and answer.
        trees: Shapes that rounds will have.
        tp: Ranks that share the target.
        around: What a draft in a process of its own lives in.
        settings: Further settings of the target by name, as text; they win.
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
        """Whether there is a draft at all."""
        return bool(self.trees)

    @property
    def draft_is_apart(self) -> bool:
        """Whether the draft has a process of its own."""
        return self.drafts and self.transport is not DraftTransport.INPROC


Taken = tuple[float, list[TimedAnswer]]
"""The seconds of a batch, and its answers."""


class BenchEngine:
    """A running engine. Make it by `running_engine`."""

    def __init__(self, target: Target, decoder: Decoder, synthetic: SyntheticAcceptance) -> None:
        self.decoder = decoder
        self.synthetic = synthetic
        self._target = target
        self._limits = target.serving.limits
        self._batches = 0

    @property
    def device(self) -> torch.device:
        """Where the target runs; with several GPUs, the first of them."""
        return self.decoder.device

    @property
    def graphs(self) -> int:
        """CUDA graphs that the target holds by now, its steps and rounds."""
        return self._target.recorded_graphs

    def set_accept_length(self, accept_length: float) -> str:
        """Let rounds accept so many tokens on average from now on; returns the label of what is measured with it."""
        self.synthetic.set_rates(rates_of_mean(accept_length))
        return self.synthetic.describe()

    def run_batch(
        self, prompts: Sequence[Sequence[int]], new_tokens: int | Sequence[int], tree: DraftShape | None
    ) -> Taken:
        """Generate for all prompts at once; see `start_batch` and `RunningBatch.wait`."""
        return self.start_batch(prompts, new_tokens, tree).wait()

    def start_batch(
        self, prompts: Sequence[Sequence[int]], new_tokens: int | Sequence[int], tree: DraftShape | None
    ) -> RunningBatch:
        """Hand over prompts to be answered at once, greedily, with exactly `new_tokens` each.

        Args:
            new_tokens: Of every answer, or of each.
            tree: Shape of every round, or None for plain decoding.
        """
        sink = AnswerSink(len(prompts))
        engine = self._target.engine
        mode = SpeculationMode.ON if tree else SpeculationMode.OFF
        shape = tree or DraftShape(1, 1, 1)
        lengths = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        self._batches += 1
        wake, engine.wake = engine.wake, lambda: None  # the first step shall see the whole batch
        try:
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                request = GenerationRequest(
                    request_id=str(index),
                    prompt_ids=prompt,
                    max_new_tokens=length,
                    sampling=SamplingParams(temperature=0.0, seed=1000 * self._batches + index),
                    speculation=self._limits.resolve(
                        mode, depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes
                    ),
                    ignore_eos=True,
                )
                engine.submit(request, sink)
        finally:
            engine.wake = wake
        sink.started = time.perf_counter()
        engine.wake()
        return RunningBatch(sink)


class RunningBatch:
    """A batch that is being answered. Make it by `BenchEngine.start_batch`."""

    def __init__(self, sink: AnswerSink) -> None:
        self._sink = sink

    def wait(self) -> Taken:
        """Wait for the last token; returns the seconds from handing over the batch until then, and every sequence's answer.

        Raises:
            OutriderError: A request failed.
            UnavailableError: The engine does not answer.
        """
        sink = self._sink
        self._until(sink.done.wait)
        return sink.ended - sink.started, [sink.answer(str(index)) for index in range(sink.requests)]

    def wait_for_steps(self, steps: int) -> None:
        """Wait until every sequence got tokens in so many steps more, the one of its prefill included, or the first one ended.

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
    """Make the model, start its draft and its engine, and stop all on leaving.

    Raises:
        ConfigurationError: A setting is wrong, or the GPU's memory does not hold it.
        UnavailableError: The draft did not come up.
    """
    log: deque[str] = deque(maxlen=30)
    with ExitStack() as cleanup:
        settings = _settings(options, NO_DRAFT)
        device, dtype = placement(options)
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
        asyncio.run(target.wait_for_draft(DRAFT_START_S))
        state = target.drafter.state()
        if options.drafts and state is not DrafterState.ON:
            raise UnavailableError(
                f"The draft is {state.value} after {DRAFT_START_S:.0f} s. It said:\n" + "\n".join(log)
            )
        yield BenchEngine(target, decoder, synthetic)


def check_accept_length(accept_length: float) -> None:
    """Refuse an accept length that no synthetic acceptance has.

    Raises:
        ConfigurationError: It is out of range.
    """
    rates_of_mean(accept_length)


def check_draft_device(device: str) -> None:
    """Refuse a device that a draft in a process of its own cannot have, before that process is started.

    Raises:
        ConfigurationError: There is no such device.
    """
    gpus = torch.cuda.device_count()
    if DEVICE.fullmatch(device) is None or (
        device.startswith("cuda") and int(device.partition(":")[2] or 0) >= gpus
    ):
        raise ConfigurationError(
            f"--draft-device {device}: expected auto, cpu, or cuda:N of a GPU of this machine, which has {gpus}.",
            field="--draft-device",
        )


def placement(options: EngineOptions) -> tuple[torch.device, torch.dtype]:
    """Return where the target computes, and in which type.

    Raises:
        ConfigurationError: A setting is wrong, or there is no such device.
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
    return DraftSettings.load({"draft": head, "max_sessions": settings.max_running_requests, **caps})


def _start_draft(
    cleanup: ExitStack,
    options: EngineOptions,
    settings: TargetSettings,
    head: Path,
    dtype: torch.dtype,
    log: deque[str],
) -> str:
    """Start `outrider serve draft` and return the address that the target takes."""
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
    """Return ``name=value`` pairs as a dictionary.

    Raises:
        ConfigurationError: One has no ``=``.
    """
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ConfigurationError(
            f"--set {wrong[0]}: expected NAME=VALUE, a setting of `outrider serve target`.", field="--set"
        )
    return {
        name.strip().replace("-", "_"): value for name, _, value in (pair.partition("=") for pair in pairs)
    }
