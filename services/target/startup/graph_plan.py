"""Which sizes CUDA graphs are recorded for, which rounds stay on the device, and the recording before anybody is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.kernels.ahead import compile_ahead
from outrider.services.target.engine.device_loop import OverlapPlan
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.policy.offered_shapes import MOST_ROWS, offered_shapes
from outrider.services.target.settings import OverlapSchedule, Quantization, TargetSettings
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.buckets import Buckets, batch_buckets
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.drafter import Drafter, DrafterState
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

PREFILL_SIZES = (32, 64, 128, 256)
"""Larger passes take the device longer than the host takes to launch them."""
FP8_PREFILL_SIZES = (*PREFILL_SIZES, 384, 512)
"""With products in FP8 the device needs half the time and the host, which launches the rounding of their rows too, more."""

POLL_S = 0.02


_log = get_logger("outrider.target")


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What a target does with graphs.

    Attributes:
        graphs: Whether anything is recorded.
        overlap: Which rounds stay on the device; None for none.
        buckets: What passes of host-driven rounds are padded to; None runs them as they come.
        shapes: The usual shapes of rounds.
        forms: What `auto` chooses its shapes within; empty where nobody asks for `auto`.
        prefills: Rows of the passes over short prompts.
        waits: Whether the attention backend waits for the device.
    """

    graphs: bool
    overlap: OverlapPlan | None
    buckets: Buckets | None
    shapes: tuple[DraftShape, ...]
    forms: tuple[DraftShape, ...]
    prefills: tuple[int, ...]
    waits: bool = False

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What batches are padded to: of rounds that are recorded, or else of those that stay on the device."""
        if self.buckets is not None:
            return self.buckets.batch_sizes
        return () if self.overlap is None else self.overlap.batch_sizes

    def shapes_at(self, batch_size: int) -> tuple[DraftShape, ...]:
        """Return the shapes of rounds that are recorded for one bucket: the usual ones if not too large, and all that `auto` may choose.

        A stream that met one of them unrecorded would wait for it, and under load many are met one after the other.
        """
        usual = (shape for shape in self.shapes if batch_size * shape.max_nodes <= MOST_ROWS)
        return tuple(dict.fromkeys((*usual, *offered_shapes(self.forms, batch_size))))


def plan_graphs(settings: TargetSettings, *, cuda: bool, waits: bool, offers: bool = True) -> GraphPlan:
    """Decide; pure, so that it is tested without a GPU.

    Args:
        settings: The target's.
        cuda: Whether the model runs on a GPU.
        waits: Whether the attention backend waits for the device, so that its passes can be neither recorded nor run ahead.
        offers: Whether requests come that leave the choice of a shape to `auto`.
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
    max_bs = min(settings.cuda_graph_max_bs, settings.max_running_requests)
    buckets = Buckets.make(max_bs, settings.max_nodes, [shape.max_nodes for shape in usual])
    beyond = (size for size in batch_buckets(settings.max_running_requests) if size > max_bs)
    overlap = OverlapPlan((*buckets.batch_sizes, *beyond), settings.num_steps + 1, max_bs)
    on = overlaps[settings.overlap_schedule] and not settings.disable_overlap_schedule
    # Padding moves a row within its tile, which batch-invariant kernels do not allow for; ranks would have to gather one row's logits.
    sizes = FP8_PREFILL_SIZES if settings.quantization is Quantization.FP8 else PREFILL_SIZES
    prefills = sizes if graphs and not settings.deterministic and settings.tp == 1 else ()
    shapes, forms = (NO_DRAFT, *dict.fromkeys(usual)), auto.forms if offers else ()
    return GraphPlan(
        graphs, overlap if on else None, buckets if graphs else None, shapes, forms, prefills, waits
    )


def await_draft(drafter: Drafter, timeout_s: float, given_up: Callable[[], bool]) -> float:
    """Wait until a draft elsewhere has said what it wants captured, as what is recorded holds that; returns for how many seconds.

    Args:
        drafter: Of the engine; its thread does not run yet.
        timeout_s: No longer than that: a target serves without its draft too.
        given_up: Whether there is no use in waiting: the draft has refused, or is not there, or the process is to end.
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
    *,
    to_console: bool,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Record prompts, then at every batch size what `shapes_at` names: the usual shapes of at most `MOST_ROWS` rows, and those of `auto`.

    The largest of each come first: smaller ones then fit into the memory of larger ones.

    Says how far it is, on the console or in the log, and what it took. Call before the engine's thread runs. All of it stays; of what is
    recorded later, `graphs` keeps a bounded part. If a draft comes later that wants other features, the engine records again for it.
    Once it is `stopped` nothing more is recorded.
    """
    if not graphs.enabled:
        return
    started = time.monotonic()
    work = list(_recordings(engine, plan))
    with _progress("recording CUDA graphs", to_console) as progress, graphs.keeping():
        for done, (description, record) in enumerate(work, 1):
            if stopped():
                return
            record()
            progress.tell(done, len(work), description)
    mib = round(graphs.memory_bytes / 2**20)
    _log.info(
        "CUDA graphs recorded",
        graphs=len(graphs.keys),
        memory_mib=mib,
        seconds=round(time.monotonic() - started, 1),
    )
    engine.again.follow(lambda: [record for _, record in _recordings(engine, plan)])


def compile_kernels(
    engine: TargetEngine,
    graphs: GraphCache,
    plan: GraphPlan,
    more: Sequence[Callable[[], object]] = (),
    *,
    to_console: bool,
) -> None:
    """Have the kernels of `more`, and of all that `record_graphs` records, compiled by several processes at once, if they are not yet.

    Without graphs, those of rounds that stay on the device. Not where other ranks would have to go along, nor where attention waits for
    what a rehearsal does not compute: there kernels are compiled when they are launched first, which the log says. Without `more`, what a
    draft adds comes first: the rehearsal looks at the first pieces alone if those miss nothing.
    """
    if graphs.device.type != "cuda":
        return
    if graphs.observed or plan.waits:
        why = "other ranks launch them too" if graphs.observed else "attention waits for the device"
        _log.info(
            "kernels are compiled when they are launched first, unless an earlier start has left them",
            why=why,
        )
        return
    started = time.monotonic()
    with _progress("compiling kernels", to_console) as progress:
        recordings = [record for _, record in _recordings(engine, plan)]
        works = [*more, *recordings] if more else recordings[::-1]
        compiled = compile_ahead(graphs.device, works, progress.tell)
    if compiled:
        _log.info("kernels compiled", kernels=compiled, seconds=round(time.monotonic() - started, 1))


def _recordings(engine: TargetEngine, plan: GraphPlan) -> Iterator[tuple[str, Callable[[], None]]]:
    for size in reversed(plan.prefills):
        yield f"prompts of {size} tokens", engine.prefill_recording(size)
    for bs in reversed(plan.batch_sizes):
        for shape in plan.shapes_at(bs):
            for record in engine.recordings(bs, shape):
                yield f"batch {bs}, {shape.max_nodes} nodes", record


class _Teller:
    """Says on a bar, or in the log at every quarter, how much of something is done."""

    def __init__(self, title: str, progress: Progress | None) -> None:
        self._title = title
        self._progress = progress
        self._task = None if progress is None else progress.add_task(title, total=None)
        self._quarters = 0

    def __enter__(self) -> _Teller:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def tell(self, done: int, total: int, description: str = "") -> None:
        """Note how many of how many are done."""
        if self._progress is not None and self._task is not None:
            text = f"{self._title}: {description}" if description else self._title
            self._progress.update(self._task, completed=done, total=total, description=text)
        elif 4 * done // total > self._quarters:
            self._quarters = 4 * done // total
            _log.info(self._title, percent=25 * self._quarters)


def _progress(title: str, to_console: bool) -> _Teller:
    console = Console(stderr=True)
    if not (to_console and console.is_terminal):
        return _Teller(title, None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return _Teller(title, Progress(*columns, console=console, transient=True))
