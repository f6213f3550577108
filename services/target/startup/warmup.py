"""What happens before a target serves.

The parity check: a tree must yield exactly what plain decoding yields, on this device, with these kernels. Then a few short requests
through the whole engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch

from outrider.services.target.drafting.no_drafter import root_trees
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.engine.rounds import advance
from outrider.services.target.model.model_runner import FAILED_TOKEN, ModelRunner
from outrider.services.target.policy.controller import ExecutedRow, ExecutedStep, SpeculationController
from outrider.services.target.request import (
    Event,
    GenerationRequest,
    SamplingParams,
    SpeculationLimits,
    SpeculationMode,
    SpeculationParams,
    TokensEvent,
)
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.shared.spec.tree import NO_DRAFT, DraftBatch

PROMPT_LEN = 9
PLAIN_STEPS = 8
TREE_DEPTH = 4
WARM_UP_ROOM = PLAIN_STEPS + 2 * TREE_DEPTH + 2
"""Tokens that a sequence here may have behind its prompt."""
REHEARSED_PROMPTS = ((300,), (2000,), (40, 50), (300, 400))
RUN_THROUGH_PROMPT = 48
RUN_THROUGH_TOKENS = 32
RUN_THROUGH_TIMEOUT_S = 5.0
LOW_PRECISION_RETRIES = 3
"""bf16 and fp16 may flip a near-tie between row counts; another prompt then decides."""

_log = logging.getLogger("outrider.target")


class _NoSink:
    def deliver(self, events: Seq[Event]) -> None:
        """Nobody listens to the parity check."""


class _EndSink:
    """Says when a request is over."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def deliver(self, events: Seq[Event]) -> None:
        """See `EventSink.deliver`."""
        if any(not isinstance(event, TokensEvent) for event in events):
            self.ended.set()


def run_through(engine: TargetEngine, limits: SpeculationLimits) -> None:
    """Generate a little through the running engine and its drafter, greedily and sampled, so that first requests meet no cold start.

    What the controller learns of costs is kept, the counters start over.
    """
    rounds = (
        (SpeculationMode.ON, 0.0),
        (SpeculationMode.ON, 1.0),
        (SpeculationMode.OFF, 0.0),
        (SpeculationMode.AUTO, 0.0),
    )
    for mode, temperature in rounds:
        sink = _EndSink()
        length = min(RUN_THROUGH_PROMPT, engine.limits.max_model_len // 2)
        request = GenerationRequest(
            request_id="warm-up",
            prompt_ids=[(7 + 13 * index) % engine.limits.vocab_size for index in range(length)],
            max_new_tokens=min(RUN_THROUGH_TOKENS, length),
            sampling=SamplingParams(temperature=temperature),
            speculation=limits.resolve(mode),
            ignore_eos=True,
            deadline=time.monotonic() + RUN_THROUGH_TIMEOUT_S,
        )
        try:
            engine.submit(request, sink)
        except InvalidRequestError:
            return  # a pool too small for this is too small for a cold start to matter
        sink.ended.wait(2 * RUN_THROUGH_TIMEOUT_S)
    engine.forget_warm_up()


def check_parity(runner: ModelRunner, controller: SpeculationController) -> None:
    """Generate a few tokens plainly, then verify a tree that holds them among wrong siblings; tell the controller how long a step takes.

    Raises:
        UnavailableError: The tree yields other tokens, or the model yields no numbers: this process must not serve.
    """
    attempts = 1 if runner.decoder.dtype == torch.float32 else LOW_PRECISION_RETRIES
    for attempt in range(attempts):
        plain = _plain(runner, attempt, controller)
        tree = _tree(runner, attempt, plain)
        if tree == plain[1 : 2 + TREE_DEPTH]:
            return
        _log.warning("parity check %d: plain %s, tree %s", attempt, plain, tree)
    raise UnavailableError(
        "The warm-up parity check failed: verifying a tree yields other tokens than plain decoding on this device. "
        "Try --attention-backend reference, and report it.",
        reason="parity_check_failed",
    )


def _plain(runner: ModelRunner, attempt: int, controller: SpeculationController) -> list[int]:
    """Return the first 1 + PLAIN_STEPS greedy tokens."""
    sequence = _sequence(runner, attempt)
    try:
        emitted = _prefill(runner, sequence)
        for _ in range(PLAIN_STEPS):
            started = time.monotonic()
            outcomes, _features = runner.verify([sequence], root_trees(sequence.tokens[-1:], runner.device))
            seconds = time.monotonic() - started
            controller.observe(ExecutedStep([ExecutedRow(None, 1, 0, 0)], 0, None, seconds, 0.0))
            emitted += outcomes[0].emitted
            advance(sequence, outcomes[0].emitted)
            sequence.cached_len += 1
        if FAILED_TOKEN in emitted:
            raise UnavailableError(
                "The model's output is not a number (NaN or infinity): the checkpoint is damaged.",
                reason="nan_logits",
            )
        return emitted
    finally:
        _release(sequence)


def _tree(runner: ModelRunner, attempt: int, plain: list[int]) -> list[int]:
    """Return what a tree emits whose second child at every level is the plain token."""
    sequence = _sequence(runner, attempt)
    try:
        _prefill(runner, sequence)
        drafts = _tree_with_decoys(
            plain[0], plain[1 : 1 + TREE_DEPTH], runner.decoder.config.vocab_size, runner.device
        )
        outcomes, _features = runner.verify([sequence], drafts)
        return outcomes[0].emitted
    finally:
        _release(sequence)


def _tree_with_decoys(root: int, truth: list[int], vocab_size: int, device: torch.device) -> DraftBatch:
    tokens, parents, depths, masks = [root], [-1], [0], [1]
    parent = 0
    for depth, token in enumerate(truth, 1):
        for candidate in ((token + 1) % vocab_size, token):
            masks.append(masks[parent] | 1 << len(tokens))
            tokens.append(candidate)
            parents.append(parent)
            depths.append(depth)
        parent = len(tokens) - 1

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.int32, device=device)

    return DraftBatch(row(tokens), row(parents), row(depths), row([len(tokens)])[0], row(masks)[:, :, None])


def _prefill(runner: ModelRunner, sequence: Sequence) -> list[int]:
    emitted = runner.prefill([PrefillChunk(sequence, 0, PROMPT_LEN)])
    sequence.cached_len = PROMPT_LEN
    advance(sequence, emitted)
    return emitted


def prompt_rehearsals(runner: ModelRunner) -> list[Callable[[], object]]:
    """Return passes over prompts longer than those that are recorded, alone and two at a time, that the pool has room for.

    See `kernels.ahead`.
    """
    pool = runner.pool
    pages = {
        lengths: sum(pool.pages_for(length + WARM_UP_ROOM) for length in lengths)
        for lengths in REHEARSED_PROMPTS
    }
    return [
        partial(_prefill_together, runner, lengths)
        for lengths, needed in pages.items()
        if needed <= pool.num_pages
    ]


def _prefill_together(runner: ModelRunner, lengths: Seq[int]) -> None:
    sequences: list[Sequence] = []
    try:
        for index, length in enumerate(lengths):
            sequences.append(_sequence(runner, index, length))
            sequences[-1].wants_drafts = runner.captures
        runner.prefill(
            [PrefillChunk(sequence, 0, length) for sequence, length in zip(sequences, lengths, strict=True)]
        )
    finally:
        for sequence in sequences:
            _release(sequence)


def _sequence(runner: ModelRunner, attempt: int, length: int = PROMPT_LEN) -> Sequence:
    vocab_size = runner.decoder.config.vocab_size
    request = GenerationRequest(
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


def _release(sequence: Sequence) -> None:
    if sequence.lease is not None:
        sequence.lease.release()
        sequence.lease = None
