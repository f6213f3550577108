"""Decides which CUDA graphs are recorded and how far the decode loop runs ahead, and records the graphs.

The module also compiles kernels before they are launched for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.kernels.ahead import compile_ahead, compiled_or_soon
from outrider.services.target.choices import OverlapSchedule
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.engine.recorder import RecordingList, always
from outrider.services.target.engine.recordings import Recordings
from outrider.services.target.model.packed_batch import SamplingMode
from outrider.services.target.model.prefill_graph import (
    PREFILL_SIZES,
    WHOLE_PROMPT_SIZES,
    fitting,
)
from outrider.services.target.policy.offered_shapes import MOST_ROWS, offered_shapes
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.buckets import batch_buckets, power_of_2
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.obs.logging import get_logger
from outrider.shared.obs.progress import Progress, log_lines
from outrider.shared.spec.drafter import Drafter, DrafterState
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FIRST_SIZES = (1, 4, 16, 64)
"""Batch sizes whose plain rounds are recorded before the server is ready."""

MIXED_SIZES = (*range(8, 65, 8), 96, 128, 160, 192, 256, 384, 768)
"""Numbers of rows of mixed rounds whose kernels are compiled in the background from the start on. Rounds with
other numbers of rows mostly need the same kernels."""

POLL_S = 0.02

_log = get_logger("outrider.target")


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The target's use of CUDA graphs, and the configuration of its decode loop.

    Attributes:
        graphs: True if CUDA graphs are recorded.
        loop: Configures the decode loop.
        batch_sizes: Batch sizes whose rounds are recorded, ascending.
        shapes: The usual tree shapes of rounds: no drafts, the default tree, and a chain of the same depth.
        forms: The largest tree and the longest chain that mode `auto` may choose. Empty if no request uses
            `auto`.
        prefills: Sizes, in rows, of the passes over prompts that are recorded.
        other_trees: Trees with other numbers of branches than the usual shapes, which clients may ask for.
            Their kernels are compiled in the background from the start on.
        waits: True if the attention backend makes the host wait for the device.
    """

    graphs: bool
    loop: LoopPlan
    batch_sizes: tuple[int, ...]
    shapes: tuple[DraftShape, ...]
    forms: tuple[DraftShape, ...]
    prefills: tuple[int, ...]
    waits: bool = False
    other_trees: tuple[DraftShape, ...] = ()

    @property
    def first_batches(self) -> list[tuple[int, DraftShape]]:
        """Batch sizes and tree shapes of the rounds that are recorded before the server is ready.

        If no CUDA graph is recorded for the size of a plain round, the round is padded to the next recorded
        size.
        """
        sizes = [size for size in self.batch_sizes if size in FIRST_SIZES or size == self.batch_sizes[-1]]
        default = [(1, shape) for shape in self.shapes[1:2]]
        return [*((size, NO_DRAFT) for size in reversed(sizes)), *default]

    @property
    def batches(self) -> list[tuple[int, DraftShape]]:
        """Batch sizes and shapes of all rounds of equal requests that are recorded, the largest first."""
        return [(size, shape) for size in reversed(self.batch_sizes) for shape in self.shapes_at(size)]

    def shapes_at(self, batch_size: int) -> tuple[DraftShape, ...]:
        """Return the tree shapes of the rounds that are recorded for one batch size.

        The result contains all usual shapes that are not too large, and all shapes that mode `auto` may
        choose.
        """
        usual = (shape for shape in self.shapes if batch_size * shape.max_nodes <= MOST_ROWS)
        return tuple(dict.fromkeys((*usual, *offered_shapes(self.forms, batch_size))))


def plan_graphs(settings: TargetSettings, *, cuda: bool, waits: bool, offers: bool = True) -> GraphPlan:
    """Decide which CUDA graphs are recorded and which rounds stay on the device. This function needs no GPU.

    Args:
        settings: The target's settings.
        cuda: True if the model runs on a GPU.
        waits: True if the attention backend makes the host wait for the device. Passes then cannot be
            recorded or enqueued ahead.
        offers: True if requests may leave the choice of a tree shape to mode `auto`.
    """
    graphs = cuda and not waits and not settings.disable_cuda_graph
    overlaps = {
        OverlapSchedule.AUTO: cuda and not waits,
        OverlapSchedule.ON: True,
        OverlapSchedule.OFF: False,
    }
    auto = settings.limits().resolve(SpeculationMode.AUTO)
    tree = auto.shape
    usual = (tree, DraftShape(tree.depth, 1, tree.depth + 1)) if tree.drafts else ()
    max_bs = min(settings.cuda_graph_max_bs, settings.running_requests)
    on = overlaps[settings.overlap_schedule] and not settings.disable_overlap_schedule
    loop = LoopPlan(
        lookahead=int(on),
        drafts_on_device=on,
        max_depth=settings.max_steps,
        max_nodes=settings.max_nodes,
        max_packed_rows=settings.max_packed_rows,
        prefill_budget_s=settings.prefill_budget_ms / 1e3,
        recorded_entries=max_bs,
    )
    # Passes over prompts are not recorded in two cases. Padding changes the tiles of batch-invariant kernels.
    # With several ranks, a pass of many rows has collectives that have not been tried in graphs.
    records = graphs and not settings.deterministic and settings.tp == 1
    prefills = fitting(PREFILL_SIZES, settings.prefill_tokens()) if records else ()
    shapes, forms = (NO_DRAFT, *dict.fromkeys(usual)), auto.forms if offers else ()
    others = other_trees(tree, settings.max_topk, settings.max_nodes) if tree.drafts else ()
    return GraphPlan(graphs, loop, batch_buckets(max_bs), shapes, forms, prefills, waits, others)


def other_trees(tree: DraftShape, max_topk: int, max_nodes: int) -> tuple[DraftShape, ...]:
    """Return one tree for each number of branches whose kernels differ from those of the default tree.

    The kernels of a level differ among powers of two, to which the number of branches is rounded up.

    Args:
        tree: The default tree.
        max_topk, max_nodes: Limits on the trees that clients may ask for.
    """
    usual = {1, power_of_2(tree.topk)}
    numbers = (1 << bits for bits in range(power_of_2(max_topk).bit_length()))
    return tuple(
        DraftShape(tree.depth, min(topk, max_topk), min(max_nodes, 1 + tree.depth * min(topk, max_topk)))
        for topk in numbers
        if topk not in usual
    )


def await_draft(drafter: Drafter, timeout_s: float, given_up: Callable[[], bool]) -> float:
    """Wait until a remote draft has announced the features that it needs.

    CUDA graphs capture these features, so the target waits before it records graphs.

    Args:
        drafter: The engine's drafter. The engine's thread must not run yet.
        timeout_s: Maximum wait in seconds. Afterwards, the target serves without its draft.
        given_up: Function that returns True if further waiting is pointless. This is the case if the draft
            has refused the target, if nothing listens at its address, or if the process must end.

    Returns:
        The time waited, in seconds.
    """
    started = time.monotonic()
    while (
        drafter.state() is DrafterState.CONNECTING
        and not given_up()
        and time.monotonic() - started < timeout_s
    ):
        time.sleep(POLL_S)
    return time.monotonic() - started


def record_graphs(
    engine: TargetEngine,
    graphs: GraphCache,
    plan: GraphPlan,
    prompts: Sequence[Callable[[], object]] = (),
    *,
    to_console: bool,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Record the CUDA graphs that are needed before the server is ready.

    The function `list_graphs` lists these graphs, and further graphs that the engine records while it is
    idle. If a draft that needs other features connects later, the engine records the graphs again.

    Call this function before the engine's thread runs. Progress is shown on the console or in the log.

    Args:
        engine: Provides the recordings.
        graphs: Stores the CUDA graphs.
        plan: Sizes and shapes of the rounds to record.
        prompts: Passes over prompts, whose kernels are compiled for all sizes in the background.
        to_console: True to show a progress bar if standard error is a terminal.
        stopped: Function that returns True once the process must end. No further graph is recorded then.
    """
    if not graphs.enabled:
        return
    recorder, rehearses = engine.recorder, not graphs.observed
    recorder.follow(
        lambda: list_graphs(engine.recordings, plan),
        partial(compiled_or_soon, graphs.device) if rehearses else always,
    )
    if rehearses:
        # These kernels are compiled in the background, so that the first requests find them.
        for works, all_sizes in background_works(engine.recordings, plan, prompts):
            compile_ahead(graphs.device, works, limit_s=None, all_sizes=all_sizes)
    total = recorder.num_first
    with Progress("recording CUDA graphs", bar=to_console, report=log_lines(_log)) as progress:
        while recorder.num_first:
            if stopped():
                recorder.forget()
                return
            description = recorder.record_next()
            progress.tell(total - recorder.num_first, total, description)


def list_graphs(recordings: Recordings, plan: GraphPlan) -> RecordingList:
    """List the CUDA graphs to record: before the server is ready, and later while the server is idle.

    Before the server is ready, only greedy rounds are recorded: plain rounds of a few sizes, and the default
    tree of a single request. The later graphs are for:

    - rounds in which all requests have the same tree shape;
    - prompts;
    - rounds with several tree shapes;
    - rounds with constrained outputs.

    Larger graphs are recorded first, so that smaller graphs can reuse their memory.
    """
    plain = [(size, NO_DRAFT) for size in reversed(plan.batch_sizes)]
    mixed = recordings.mixed()
    further = [
        *mixed[:1],
        *(recordings.prompt(size) for size in reversed(plan.prefills)),
        *(recordings.whole_prompt(size) for size in reversed(plan.prefills) if size in WHOLE_PROMPT_SIZES),
        *recordings.rounds(plan.batches),
        *recordings.rounds(plain, [SamplingMode.FILTERED]),
        *mixed[1:],
        *recordings.masked(),
    ]
    return RecordingList(recordings.rounds(plan.first_batches, [SamplingMode.GREEDY]), further)


def compile_kernels(
    engine: TargetEngine,
    graphs: GraphCache,
    plan: GraphPlan,
    more: Sequence[Callable[[], object]] = (),
    *,
    to_console: bool,
) -> None:
    """Compile the kernels that the server's start needs, in several processes.

    These are the kernels of the passes in `more`, of the first graphs of `list_graphs`, and of the same
    rounds with sampled requests. They are compiled even if no CUDA graphs are recorded. `record_graphs`
    compiles other kernels in the background.

    A rehearsal finds the kernels: it runs passes without launching kernels. A rehearsal is impossible if the
    model has several ranks, or if attention needs values that a rehearsal does not compute. Kernels are then
    compiled at their first launch, and this is logged.

    Args:
        engine: Provides the recordings.
        graphs: The graph cache that the recordings use.
        plan: Sizes and shapes of the rounds to record.
        more: Further passes, which are rehearsed before the rounds.
        to_console: True to show a progress bar if standard error is a terminal.
    """
    if graphs.device.type != "cuda":
        return
    _log_late_compilations()
    if graphs.observed or plan.waits:
        why = (
            "other ranks would have to launch them too"
            if graphs.observed
            else "the attention backend waits for the device"
        )
        _log.info(
            "kernels are compiled at their first launch, unless an earlier start has cached them",
            why=why,
        )
        return
    started = time.monotonic()
    with Progress("compiling kernels", bar=to_console, report=log_lines(_log)) as progress:
        listed = engine.recordings.rounds(plan.first_batches)
        recordings = [record for _, record in listed]
        # A rehearsal stops early if its first passes need no new kernel, so recordings of drafts go first.
        works = [*more, *recordings] if more else recordings[::-1]
        compiled = compile_ahead(graphs.device, works, progress.tell)
    if compiled:
        _log.info("kernels compiled", kernels=compiled, seconds=round(time.monotonic() - started, 1))


def _log_late_compilations() -> None:
    from outrider.kernels.ahead.late import log_late_compilations  # needs Triton

    log_late_compilations()


def background_works(
    recordings: Recordings, plan: GraphPlan, prompts: Sequence[Callable[[], object]]
) -> list[tuple[list[Callable[[], object]], bool]]:
    """Return work whose kernels are compiled in the background from the start on, the most urgent first.

    Many requests may come before any graph except the first ones is recorded. Their rounds and prompts then
    run kernel by kernel, with any number of rows.

    Args:
        recordings: Lists the recordings of rounds.
        plan: Sizes and shapes of the rounds.
        prompts: Passes over prompts.

    Returns:
        Pairs of works, and whether their kernels are needed for all sizes (see `compile_ahead`).
    """
    of_one = [(1, shape) for shape in plan.shapes_at(1)]
    others = [(1, shape) for shape in plan.other_trees]
    # The start of the draft has compiled the kernels for batches of 1, 2, 4 … sequences.
    others += [(size, shape) for size in plan.batch_sizes if size & (size - 1) for shape in plan.shapes[1:]]
    rounds = recordings.rounds(of_one, list(SamplingMode))
    usual = recordings.rounds([(1, shape) for shape in plan.shapes[1::-1]], [SamplingMode.GREEDY])
    mixed = recordings.mixed([SamplingMode.GREEDY], MIXED_SIZES)
    return [
        ([record for _, record in rounds], False),
        ([*(record for _, record in usual), *prompts[:1]], True),
        ([record for _, record in (*mixed, *recordings.rounds(others))], False),
    ]
