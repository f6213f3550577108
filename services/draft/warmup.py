"""Warms up the draft with made-up sessions: compiles kernels, captures CUDA graphs, and checks for leaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch

from outrider.kernels.ahead import CompileWork, compile_ahead, rehearsing
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.shared.base.errors import CheckpointError
from outrider.shared.engine.buckets import power_of_2, powers_of_2
from outrider.shared.nn.fused.products import HasProducts, row_classes
from outrider.shared.nn.fused.trial import DRAFT_BUDGET_S, try_products
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

_log = get_logger("outrider.draft")

WARM_UP_PEER = PeerId(0)
PROMPT_LEN = 20
CATCH_UP_ROWS = (3, 300)
"""Numbers of rows of catch-ups for a draft without fused kernels."""
PERIOD = 7
"""Period of the made-up sequence. The sequence repeats so that n-grams find matches."""
MOST_UNRECORDED = 16
"""Largest number of concurrent sessions for a strategy without recorded rounds."""
MOST_TOKENS = 256
"""Upper bound for the number of tokens of a made-up sequence and its tree together. The warm-up derives from
this bound how many such sequences fit into the cache."""


def warm_up(
    engine: DraftEngine,
    device: torch.device,
    *,
    record: bool = True,
    tiles: bool = True,
    tiles_s: float = DRAFT_BUDGET_S,
) -> list[CompileWork]:
    """Warm up a draft engine: process a made-up prompt, and grow trees without and with sampling noise.

    The draft can serve as soon as this function returns. On a GPU, the returned work does the same for
    batches of several sizes.

    Args:
        engine: The draft engine, without sessions.
        device: The engine's device.
        record: Whether the draft has its own process. If so, all kernels are compiled first. The returned
            work then also records the CUDA graphs for the rounds that the host starts.
        tiles: Whether to tune the kernel tiles of those matrix products for which no tile was ever measured.
        tiles_s: Start no further tuning after this time, in seconds.

    Returns:
        Work to run while no session is open.

    Raises:
        CheckpointError: The draft's output is not finite, because its weights are damaged or its dtype is too
            narrow.
    """
    if device.type == "cuda":
        from outrider.kernels.ahead.late import log_late_compilations  # needs Triton

        log_late_compilations()
    # 1. Tune tiles. Then rehearse the work without running kernels, to find and compile all kernels that the
    # work needs.
    if tiles and isinstance(engine.strategy, HasProducts):
        try_products(engine.strategy.uses(), device, tiles_s)
    first, further = list(_first_works(engine, device)), list(_further_works(engine, device, record))
    if compiled := compile_ahead(device, [*first, *further] if record else first):
        _log.info("kernels compiled", kernels=compiled)
    if record:
        # Sessions that catch up have any number of rows. A target in the same process compiles these kernels
        # with those of its rounds.
        compile_ahead(device, first, limit_s=None, all_sizes=True)
    else:
        compile_ahead(device, further, limit_s=None)
    engine.drop_peer(WARM_UP_PEER)  # a failed rehearsal may have left sessions
    # 2. Run the first work, and return the rest.
    for work in first:
        _keep_graphs(engine, work)
    return [partial(_keep_graphs, engine, work) for work in further]


def _keep_graphs(engine: DraftEngine, work: CompileWork) -> None:
    """Run a piece of work. The CUDA graphs that it records are permanent."""
    growth = engine.strategy.growth
    with growth.graphs.cache.keeping() if growth is not None else nullcontext():
        work()


def _first_works(engine: DraftEngine, device: torch.device) -> Iterator[CompileWork]:
    for temperature in (1.0, 0.0) if device.type == "cuda" else (1.0,):
        yield partial(_follow, engine, 1, temperature)
    growth = engine.strategy.growth
    if growth is not None and growth.extension is not None:
        yield growth.extension.record


def _further_works(engine: DraftEngine, device: torch.device, record: bool) -> Iterator[CompileWork]:
    batches = compiled_batches(engine) if device.type == "cuda" else (1,)
    growth = engine.strategy.growth
    if record and growth is not None and growth.host is not None:
        for sessions in batches:
            for shape in usual_shapes(engine):
                yield partial(growth.host.record, sessions, shape)
    for sessions in batches[1:]:
        for temperature in (1.0, 0.0):
            yield partial(_follow, engine, min(sessions, engine.sessions.limits.max_sessions), temperature)
    if device.type == "cuda" and growth is not None:
        # Sessions that have not drafted for a while process any number of tokens at once.
        uses = engine.strategy.uses() if isinstance(engine.strategy, HasProducts) else []
        for rows in dict.fromkeys((*(row_classes(uses) if uses else ()), *CATCH_UP_ROWS)):
            yield partial(_catch_up, engine, rows)


def compiled_batches(engine: DraftEngine) -> tuple[int, ...]:
    """Return the batch sizes for which the warm-up compiles kernels: 1, 2, 4 … up to the largest batch.

    The size of the KV cache also limits the largest batch. Sizes are padded to powers of two. Triton compiles
    separate kernels for a size of 1, for multiples of 16, and for each padded size. The warm-up compiles them
    all, because a compilation takes longer than a target waits for a tree.
    """
    pages, growth = engine.strategy.pages(), engine.strategy.growth
    most = engine.sessions.limits.max_sessions
    if growth is None:
        most = min(most, MOST_UNRECORDED)
    else:
        most = min(most, growth.graphs.max_bs, pages.total * growth.memory.pool.page_size // MOST_TOKENS)
    return powers_of_2(power_of_2(most))


def usual_shapes(engine: DraftEngine) -> tuple[DraftShape, ...]:
    """Return the default tree, and the chain of the same depth."""
    tree = engine.sessions.limits.usual_shape
    return tuple(dict.fromkeys((tree, DraftShape(tree.depth, 1, min(tree.depth + 1, tree.max_nodes)))))


def _catch_up(engine: DraftEngine, rows: int) -> None:
    """Extend a session by this number of rows, without growing a tree."""
    if rows < engine.strategy.info.max_len:
        fence = _open(engine, 0, 0.0, rows + 1)
        engine.catch_up(WARM_UP_PEER, [fence.session_id])
        engine.drop_peer(WARM_UP_PEER)


def _open(engine: DraftEngine, session: int, temperature: float, length: int) -> Fence:
    """Open a session with a made-up sequence and all its features."""
    info = engine.strategy.info
    tokens = [index % min(PERIOD, info.vocab_size) for index in range(length)]
    fence = Fence(session, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
    engine.open(WARM_UP_PEER, SequenceOpen(fence, tokens, seed=0, temperature=temperature))
    if info.feature_size:
        engine.add_features(WARM_UP_PEER, session, 1, 0, torch.ones(length - 1, info.feature_size))
    return fence


def _follow(engine: DraftEngine, sessions: int, temperature: float) -> None:
    """Grow trees for sessions that have a short prompt."""
    fences = [_open(engine, session, temperature, PROMPT_LEN) for session in range(sessions)]
    for fitting in usual_shapes(engine):
        for fence in fences:
            engine.commit(WARM_UP_PEER, Commit(fence, PROMPT_LEN, (), None), Ask(0, fitting, asked_s=0.0))
        for proposal in engine.step().proposals:
            if fitting.bounded().drafts and not rehearsing() and int(proposal.trees.num_nodes.min()) < 2:
                raise CheckpointError(
                    f"{engine.strategy.info.model_id}: the logits are not finite. Its weights are damaged, "
                    "or --dtype is too narrow.",
                    field="draft",
                )
    engine.drop_peer(WARM_UP_PEER)
    engine.check()
