"""Sessions through the whole engine before anybody is served: compiles kernels, touches memory, and proves that nothing leaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from outrider.kernels.ahead import Work, compile_ahead, rehearsing
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.session import Ask, PeerId
from outrider.shared.base.errors import CheckpointError
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

_log = get_logger("outrider.draft")

WARM_UP_PEER = PeerId(0)
PROMPT_LEN = 20
LONG_PROMPT_LEN = 300
"""More rows than are recorded."""
PERIOD = 7
"""The made-up sequence repeats itself, so that n-grams have something to find."""
SHAPES = (DraftShape(5, 4, 16), DraftShape(5, 1, 6))
COMPILED_BATCHES = (1, 2, 4, 8, 16)
"""Kernels are compiled anew where a size is 1, a multiple of 16, or padded to another power of two; a compilation in mid-stream takes
longer than a target waits."""


def warm_up(engine: DraftEngine, device: torch.device, *, record: bool = True) -> None:
    """Follow made-up sequences and grow trees of the default shapes, greedy and with noise; on a GPU in batches of several sizes.

    Args:
        engine: Follows nobody yet.
        device: Where it computes.
        record: Record the rounds that the host starts on a GPU too; for a draft whose rounds do not stay on the device.

    Raises:
        CheckpointError: the draft's output is not finite: its weights are damaged, or its dtype is too narrow.
    """
    works = list(_works(engine, device, record))
    if compiled := compile_ahead(device, works):
        _log.info("kernels compiled", kernels=compiled)
    engine.drop_peer(WARM_UP_PEER)  # whom a rehearsal that failed may have left
    started = time.monotonic()
    for work in works:
        work()
    rounds = engine.strategy.rounds
    if rounds is not None and rounds.host is not None and rounds.host.graph_bytes:
        mib = round(rounds.host.graph_bytes / 2**20)
        _log.info("CUDA graphs recorded", memory_mib=mib, seconds=round(time.monotonic() - started, 1))


def _works(engine: DraftEngine, device: torch.device, record: bool) -> Iterator[Work]:
    batches = COMPILED_BATCHES if device.type == "cuda" else COMPILED_BATCHES[:1]
    for sessions in batches:
        for temperature in (1.0, 0.0) if device.type == "cuda" else (1.0,):
            yield partial(_follow, engine, min(sessions, engine.sessions.limits.max_sessions), temperature)
    if device.type == "cuda":
        yield partial(_follow, engine, 1, 0.0, LONG_PROMPT_LEN)
    rounds = engine.strategy.rounds
    if rounds is not None and rounds.extension is not None:
        yield rounds.extension.record
    if record and rounds is not None and rounds.host is not None:
        for sessions in batches:
            for shape in SHAPES:
                yield partial(rounds.host.record, sessions, _fitting(shape, engine.sessions.limits.max_shape))


def _fitting(shape: DraftShape, most: DraftShape) -> DraftShape:
    return DraftShape(min(shape.depth, most.depth), min(shape.topk, most.topk), min(shape.max_nodes, most.max_nodes))


def _follow(engine: DraftEngine, sessions: int, temperature: float, length: int = PROMPT_LEN) -> None:
    info, limits = engine.strategy.info, engine.sessions.limits
    length = max(PROMPT_LEN, min(length, info.max_len // 2))
    tokens = [index % min(PERIOD, info.vocab_size) for index in range(length)]
    fences = [Fence(session, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens)) for session in range(sessions)]
    for fence in fences:
        engine.open(WARM_UP_PEER, SequenceOpen(fence, tokens, seed=0, temperature=temperature))
        if info.feature_size:
            engine.add_features(WARM_UP_PEER, fence.session_id, 1, 0, torch.ones(length - 1, info.feature_size))
    for shape in SHAPES:
        fitting = _fitting(shape, limits.max_shape)
        for fence in fences:
            engine.commit(WARM_UP_PEER, Commit(fence, len(tokens), (), None), Ask(0, fitting, asked_s=0.0))
        for proposal in engine.step().proposals:
            if fitting.bounded().drafts and not rehearsing() and int(proposal.trees.num_nodes.min()) < 2:
                raise CheckpointError(
                    f"{info.model_id}: its logits are not finite; its weights are damaged, or --dtype is too narrow.",
                    field="draft",
                )
    engine.drop_peer(WARM_UP_PEER)
    engine.check()
