"""Autotunes matrix products of few rows at startup: times GEMM tiles on GPUs without stored measurements.

A tile (`Tile`) is the method and the block sizes with which a kernel computes a product. A fixed rule picks
each product's default tile. For every shape and several row counts, the trial times the default tile, a few
similar tiles, and torch's own product. The trial uses enough matrices to exceed all caches. The fastest
choice replaces the default tile if it is faster by more than the measurement noise. The choice is stored on
disk for later starts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice

import torch

from outrider.kernels.ahead import Compiled, compile_ahead, state_of
from outrider.kernels.skinny_gemm import Method, Tile
from outrider.kernels.skinny_gemm.candidates import candidates
from outrider.kernels.skinny_gemm.kept import Tried, keep_tiles, read_tiles, tiles_file, trying_alone
from outrider.kernels.skinny_gemm.table import Product, device_name, guess_tile, needs_trial, remember
from outrider.kernels.skinny_gemm.types import LIBRARY
from outrider.shared.nn.fused.products import ProductUse, RunTile, merged
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.obs.logging import get_logger

BUDGET_S = 20.0
"""Time limit of a trial, in seconds.

An idle host with 16 cores needs half of this time, mainly to compile 100 kernels.
"""
DRAFT_BUDGET_S = 5.0
"""Time limit in a draft's own process, in seconds. Meanwhile, the target waits or serves on the same GPU."""
_COMPILING = 0.75
"""Fraction of the time limit that compilation may use."""
ROW_COUNTS = (1, 16, 64, 32, 8, 2)
"""Row counts to try, most common first.

A result is also used for all smaller row counts that are above the next smaller entry.
"""
LEAST_BYTES = 2 << 20
"""Minimum bytes of a matrix in a trial. With any tile, a smaller product takes as long as its launch."""
BETTER = 0.97
"""The best tile replaces the rule's tile only if its time is at most this fraction of the rule's time."""
_REPEATS = 7
_LAUNCHES = 8
_MOST_COPIES = 64
_CACHES = 3  # One pass over a trial's matrices reads this many times the size of the L2 cache.
_WARM_S = 0.05
Weight = tuple[torch.Tensor, torch.Tensor | None]
Clock = Callable[[], float]
Tell = Callable[[str, int, int], None]

_log = get_logger("outrider.tiles")


def try_products(
    uses: Sequence[ProductUse],
    device: torch.device,
    budget_s: float = BUDGET_S,
    *,
    clock: Clock = time.monotonic,
    tell: Tell | None = None,
) -> list[Tried]:
    """Load the tiles of earlier trials, and run a trial for the other products. Do nothing without a GPU.

    If a trial fails, the failure is logged and the products keep their default tiles. Two trials at the same
    time would disturb each other. While another process runs a trial, this process therefore only uses the
    stored results.

    Args:
        uses: The matrix products of a model.
        device: Device of the model.
        budget_s: Number of seconds after which no further measurement starts. The next start of the service
            continues the trial. A product without a measurement uses the tile of the next larger measured row
            count, or else its default tile.
        clock: Returns the time in seconds.
        tell: Called with the name of a step, and the finished and the total number of its parts. Without it,
            the progress is logged.

    Returns:
        The results of this trial and of earlier trials for these products.
    """
    if device.type != "cuda":
        return []
    # 1. Use the stored results, and find the products without one.
    name = device_name(device)
    kept = read_tiles(tiles_file(name))
    remember(name, ((entry.product, entry.tile) for entry in kept))
    uses = [use for use in merged(uses) if use.linears[0].weight.nbytes >= LEAST_BYTES]
    work = [(use, rows) for rows in ROW_COUNTS for use in uses if needs_trial(use.of(rows), name)]
    # 2. Measure these. A failed measurement must not stop the service from starting.
    tried: list[Tried] = []
    if work:
        try:
            with trying_alone(tiles_file(name)) as alone:
                if alone:
                    tried = _run(work, device, budget_s, clock, tell)
                else:
                    _log.info(
                        "another process is trying tiles; the next start tries products without stored tiles",
                        products=len(work),
                    )
        except Exception as error:
            _log.warning(
                "the trial of tiles failed; products keep their default tiles",
                error=f"{type(error).__name__}: {error}",
            )
        remember(name, ((entry.product, entry.tile) for entry in tried))
    # 3. Return the new and the stored results.
    wanted = {use.of(rows) for use in uses for rows in ROW_COUNTS} - {entry.product for entry in tried}
    known = [entry for entry in kept if entry.product in wanted]
    if known:
        _log.info("using tiles of an earlier trial", products=len(known))
    return [*known, *tried]


@torch.inference_mode()
def _run(
    work: Sequence[tuple[ProductUse, int]],
    device: torch.device,
    budget_s: float,
    clock: Clock,
    tell: Tell | None,
) -> list[Tried]:
    """Run the trial, log and store its results, and return them."""
    started, name = clock(), device_name(device)
    _log.info("trying tiles", products=len(work), device=name, budget_s=budget_s)
    with torch.cuda.device(device):
        tried = _Trial(device, clock, started + budget_s).run(work, tell)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    _log_choice(tried)
    _log.info(
        "tiles tried",
        products=len(tried),
        left_for_the_next_start=len(work) - len(tried),
        seconds=round(clock() - started, 1),
    )
    path = tiles_file(name)
    try:
        return keep_tiles(path, tried, name)
    except OSError as error:
        _log.warning(
            "tiles could not be stored; the next start tries them again", path=str(path), error=str(error)
        )
        return tried


class _Trial:
    """One trial on a device.

    Args:
        device: The current CUDA device.
        clock: Returns the time in seconds.
        deadline: Time on `clock` after which no new measurement starts.
    """

    def __init__(self, device: torch.device, clock: Clock, deadline: float) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self._multiprocessors = properties.multi_processor_count
        self._bytes = _CACHES * properties.L2_cache_size
        self._clock = clock
        self._deadline = deadline
        self._warm = False

    def run(self, work: Sequence[tuple[ProductUse, int]], tell: Tell | None) -> list[Tried]:
        """Compile the kernels of all uses, then measure one use after another until the deadline."""
        limit_s = _COMPILING * max(0.0, self._deadline - self._clock())
        if limit_s > 0.0:
            compiled = _progress_log() if tell is None else partial(tell, "compiling tiles")
            compile_ahead(self._device, [partial(self._rehearse, work)], compiled, limit_s=limit_s)
        tried = []
        for number, (use, rows) in enumerate(work):
            if tell is not None:
                tell("trying tiles", number, len(work))
            times = self._times(use, rows) if self._in_time() else {}
            if times:
                tried.append(pick(use.of(rows), times))
        return tried

    def _in_time(self) -> bool:
        return self._clock() < self._deadline

    def _tiles(self, use: ProductUse, rows: int) -> list[Tile]:
        return candidates(use.of(rows), self._multiprocessors)

    def _rehearse(self, work: Sequence[tuple[ProductUse, int]]) -> None:
        for use, rows in work:
            if not self._in_time():
                return
            run, linear = use.prepare(rows), use.linears[0]
            for tile in self._tiles(use, rows):
                with contextlib.suppress(Exception):  # A tile that fails here is not measured.
                    run(linear.weight, linear.scales, tile)

    def _times(self, use: ProductUse, rows: int) -> dict[Tile, float]:
        """Return the microseconds per launch of each tile that runs on this GPU.

        Measurements of the tiles alternate. The result is empty if a tile has not been compiled yet, or if
        the deadline passes before all tiles are recorded, because a permanent choice must consider all tiles.
        """
        run = use.prepare(rows)
        tiles = self._compiled(use, rows, run)
        ring = self._ring(use.linears) if tiles else []
        graphs = {}
        for tile in tiles:
            if not self._in_time():
                return {}
            if (graph := self._record(run, tile, ring)) is not None:
                graphs[tile] = graph
        self._warm_up(list(graphs.values()))
        spans = [(tile, _Span()) for _ in range(_REPEATS) for tile in graphs]
        for tile, span in spans:
            span.around(graphs[tile].replay)
        torch.cuda.synchronize()
        times: dict[Tile, list[float]] = {}
        for tile, span in spans:
            times.setdefault(tile, []).append(span.microseconds() / self._launches(ring))
        return {tile: statistics.median(samples) for tile, samples in times.items()}

    def _compiled(self, use: ProductUse, rows: int, run: RunTile) -> list[Tile]:
        """Return the tiles whose kernels are compiled. If a kernel is not compiled yet, return no tiles."""
        linear = use.linears[0]
        states = {
            tile: state_of(self._device, partial(run, linear.weight, linear.scales, tile))
            for tile in self._tiles(use, rows)
        }
        if Compiled.NOT_YET in states.values():
            return []
        return [tile for tile, state in states.items() if state is Compiled.YES]

    def _ring(self, linears: Sequence[Linear]) -> list[Weight]:
        """Return weights to read one after another. Copies are added until the total exceeds the caches."""
        wanted = min(_MOST_COPIES, max(min(2, len(linears)), -(-self._bytes // linears[0].weight.nbytes)))
        ring = [(linear.weight, linear.scales) for linear in linears[:wanted]]
        return ring + [(weight.clone(), scales) for weight, scales in islice(cycle(ring), wanted - len(ring))]

    def _launches(self, ring: Sequence[Weight]) -> int:
        return max(_LAUNCHES, len(ring))

    def _record(self, run: RunTile, tile: Tile, ring: Sequence[Weight]) -> torch.cuda.CUDAGraph | None:
        """Record launches with these weights in a CUDA graph. Return None if the tile fails on this GPU."""
        try:
            # The first launches compile the kernel and create cached data for each weight. Neither may happen
            # while the graph is recorded.
            for weight, scales in ring:
                run(weight, scales, tile)
            torch.cuda.synchronize()
        except Exception as error:  # For example, there may be too little shared memory.
            _log.debug("a tile does not run here", error=f"{type(error).__name__}: {error}")
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for weight, scales in islice(cycle(ring), self._launches(ring)):
                run(weight, scales, tile)
        return graph

    def _warm_up(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        """Replay graphs until the GPU, which may have been idle, has raised its clock frequency."""
        if self._warm or not graphs:
            return
        self._warm = True
        until = time.monotonic() + _WARM_S
        while time.monotonic() < until:
            for graph in graphs:
                graph.replay()
            torch.cuda.synchronize()


class _Span:
    """A time interval on the device."""

    def __init__(self) -> None:
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)

    def around(self, work: Callable[[], object]) -> None:
        """Enqueue the work between two timing events."""
        self._begin.record()
        work()
        self._end.record()

    def microseconds(self) -> float:
        """Return the duration. Call this after the device has finished the work."""
        return 1000.0 * float(self._begin.elapsed_time(self._end))


def pick(product: Product, times: Mapping[Tile, float]) -> Tried:
    """Choose a product's fastest tile. Keep the default tile unless it is slower by more than the noise.

    Args:
        product: The product that was timed.
        times: Maps each tile to its time in microseconds.
    """
    rule = guess_tile(*product.shape, product.rows, product.dtype.itemsize)
    best = min(times, key=lambda tile: times[tile])
    if rule in times and times[best] > BETTER * times[rule]:
        best = rule
    times = {tile: round(microseconds, 2) for tile, microseconds in times.items()}
    return Tried(product, best, times[best], times.get(rule), times.get(LIBRARY))


def _progress_log() -> Callable[[int, int], None]:
    """Return a progress callback that logs every quarter of the compiled kernels."""
    quarters = 0

    def log_quarter(done: int, total: int) -> None:
        nonlocal quarters
        if 4 * done // total > quarters:
            quarters = 4 * done // total
            _log.info("compiling tiles", percent=25 * quarters)

    return log_quarter


def _log_choice(tried: Sequence[Tried]) -> None:
    """Log the chosen tiles, one line per shape."""
    for shape, dtype in dict.fromkeys((entry.product.shape, entry.product.dtype) for entry in tried):
        epilogue, out_features, in_features = shape
        rows = {
            entry.product.rows: (
                f"{describe_tile(entry.tile)} {entry.microseconds} us "
                f"(rule {entry.rule}, library {entry.library})"
            )
            for entry in tried
            if (entry.product.shape, entry.product.dtype) == (shape, dtype)
        }
        _log.info("tiles", product=epilogue.name.lower(), shape=f"{out_features}x{in_features}", rows=rows)


def describe_tile(tile: Tile) -> str:
    """Return a short description of a tile."""
    if tile.method is Method.LIBRARY:
        return "library"
    size = f"{tile.block_n}x{tile.block_k}" if tile.method is Method.DOT else f"{tile.block_n}"
    return f"{tile.method.value} {size}" + (f" in {tile.splits}" if tile.splits > 1 else "")
