"""Caches CUDA graphs by key. The first run of a function under a key records a graph. Later runs replay it.

Without CUDA, the functions run eagerly.

A replay uses the same memory addresses as the recording. A recorded function must therefore:

- read its inputs from tensors that never move,
- depend on a number in host memory only if the key determines this number,
- never wait for the device,
- return tensors that the next replay may overwrite.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import count
from typing import Any, cast

import torch

from outrider.kernels.ahead import rehearsing
from outrider.shared.engine.recorded_graph import (
    GraphObserver,
    GraphPart,
    Parts,
    RecordedGraph,
    Result,
    end_broken_capture,
    finish_parts,
    next_part,
    single_part,
)

WARM_UP_RUNS = 2
"""Number of eager runs before a capture.

During these runs, Triton compiles kernels, cuBLAS allocates its workspaces, and caches of addresses fill.
"""
MAX_LATE_GRAPHS = 96
"""Largest number of kept graphs that were recorded after start-up.

At any time, requests need fewer graphs than this. The graphs take little memory compared with a model.
"""
RECORD_AFTER = 8
"""Number of eager runs of a key before its graph is recorded, if it was not recorded at start-up.

A recording takes as long as some tens of rounds.
"""
RECORD_ANYWAY_AFTER = 64
"""Number of eager runs of a key whose recording takes too long, before it is recorded nevertheless."""
MOST_LATE_S = 0.03
"""Longest time, in seconds, that a recording may take while requests wait for it."""
LAUNCHES_PER_RECORDING = 2.0
"""Expected time of a recording without warm-up runs, relative to the host's time to launch the work.

A capture calls the same functions as a launch, and then builds the graph.
"""

_log = logging.getLogger("outrider.engine")


class GraphCache:
    """CUDA graphs of one device.

    All graphs share one memory pool. Replay them on one stream, because two replays must not overlap.

    A result of `run` is valid until the next `run` or `capture` of *any* key of this cache. Another graph may
    then overwrite the result. To keep a value longer, let the function copy the value to a tensor that was
    allocated outside the function. If the result is large, let the function return `until_next_run` of it.

    Graphs recorded in a `keeping` block, at start-up, are permanent. The keys of later graphs depend on
    clients' requests. The cache keeps only the `max_late_graphs` most recently used of these later graphs.

    Args:
        device: The device that the functions run on.
        enabled: If False, every function runs eagerly on every device.
        observer: The observer to notify of every recording, replay and drop, or None.
        max_late_graphs: Largest number of graphs to keep among those that were recorded outside `keeping`.
        most_late_s: Limit, in seconds, on the expected time of a recording outside `keeping`. Applies to keys
            whose work `run_eagerly` has run before.

    Attributes:
        enabled: True if functions are recorded, which requires CUDA.
        most_late_s: The value of the argument.
        provisional_runs: Number of calls of `run_eagerly` whose key will be recorded soon. Such a call takes
            longer than the later replays.
    """

    def __init__(
        self,
        device: torch.device | str,
        enabled: bool = True,
        observer: GraphObserver | None = None,
        max_late_graphs: int = MAX_LATE_GRAPHS,
        most_late_s: float = MOST_LATE_S,
    ) -> None:
        self._device = torch.device(device)
        self.enabled = enabled and self._device.type == "cuda"
        self._observer = observer
        self._numbers = count()
        # Ordered by last use, the most recently used graph last. Permanent graphs are not reordered.
        self._recorded: dict[Hashable, RecordedGraph] = {}
        self._kept: set[Hashable] = set()
        self._max_late_graphs = max_late_graphs
        self.most_late_s = most_late_s
        self._keeping = False
        self._started = False
        self._met: Counter[Hashable] = Counter()
        # Shortest time of each key that the host needed to launch the work eagerly.
        self._launch_s: dict[Hashable, float] = {}
        self.provisional_runs = 0
        self._eager: set[Hashable] = set()
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._memory_bytes = 0

    @property
    def device(self) -> torch.device:
        """The device that the functions run on."""
        return self._device

    @property
    def observed(self) -> bool:
        """Whether the cache has an observer."""
        return self._observer is not None

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Keys of the recorded graphs, the most recently used last. Permanent graphs are not reordered."""
        return tuple(self._recorded)

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that the CUDA graphs of this cache use.

        The number includes the workspaces and compiled kernels of the warm-up runs. It is measured as the
        decrease of the device's free memory, because torch's allocator does not count a graph's own
        structures. The number therefore also includes memory that other processes allocate meanwhile.
        """
        return self._memory_bytes

    def holds(self, key: Hashable) -> bool:
        """Return whether `run` can handle this key without recording. Always True if graphs are disabled."""
        return not self.enabled or key in self._recorded or key in self._eager

    def replays(self, key: Hashable) -> bool:
        """Return whether `run` with this key would replay a graph."""
        return key in self._recorded

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Context manager: graphs recorded in this block are permanent, unless they are dropped explicitly.

        After the first such block has ended, the cache keeps at most `max_late_graphs` graphs that were
        recorded outside such a block.
        """
        self._keeping = True
        try:
            yield
        finally:
            self._keeping, self._started = False, True

    def due(self, key: Hashable, counted_as: Hashable | None = None) -> bool:
        """Return True to call `run` for this key now, or False to call `run_eagerly` instead.

        During start-up, a key is due immediately, unless `counted_as` is given. After start-up, a key is due
        when it has occurred `RECORD_AFTER` times, because a recording then probably pays off. If a recording
        would take longer than `most_late_s`, the key is due after `RECORD_ANYWAY_AFTER` times.

        Args:
            key: The key of `run`.
            counted_as: Name under which occurrences are counted, even during start-up. Keys with the same
                name share one count and become due together. With None, `key` has a count of its own.
        """
        if self.holds(key) or (not self._started and counted_as is None):
            return True
        # Limit the number of counts. Most of them belong to keys that occurred a few times, long ago.
        if len(self._met) > 8 * self._max_late_graphs:
            self._met.clear()
            self._launch_s.clear()
        counted = key if counted_as is None else counted_as
        self._met[counted] += 1
        return self._met[counted] > (RECORD_AFTER if self._is_quick(key) else RECORD_ANYWAY_AFTER)

    def expect(self, counted_as: Hashable) -> None:
        """Make the keys that are counted under this name due from their next occurrence on."""
        self._met[counted_as] = RECORD_AFTER

    def run_eagerly(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Run a function without a CUDA graph, and measure how long the host takes to launch the work.

        Args:
            key: The key under which the function would be recorded.
            function: The function.
        """
        started = time.perf_counter()
        result = function()
        self._ran(key, time.perf_counter() - started)
        return result

    def _ran(self, key: Hashable, seconds: float) -> None:
        """Note the host's time to launch the work of a key eagerly."""
        if self.enabled and not rehearsing():
            self._launch_s[key] = min(seconds, self._launch_s.get(key, seconds))
            self.provisional_runs += self._is_quick(key) and key not in self._eager

    def _is_quick(self, key: Hashable) -> bool:
        return LAUNCHES_PER_RECORDING * self._launch_s.get(key, 0.0) <= self.most_late_s

    def capture(self, key: Hashable, record: Callable[[], Any]) -> None:
        """Record a CUDA graph for `key` unless there is one. Does nothing on a CPU. Waits for the device.

        Before the capture, `record` runs eagerly `WARM_UP_RUNS` times, unless `run_eagerly` has run the work
        often enough. Call this method while the static inputs contain idle rows (lengths 0, slots -1).
        Otherwise, the eager runs overwrite data that later passes read, such as K/V.

        Some functions cannot be captured, for example because they query the device. Without an observer, the
        cache logs such a failure, and runs the function eagerly from then on. With an observer, the cache
        raises the error.

        In a rehearsal (`kernels.ahead`, a dry run that finds the kernels to compile), `record` runs once and
        no graph is recorded.
        """
        self.capture_parts(key, lambda: single_part(record))

    def capture_parts(self, key: Hashable, record: Callable[[], Parts[Any]]) -> None:
        """Record work in several parts, each as a CUDA graph. For all else, see `capture`.

        `run_parts` replays the parts one by one. A part may read tensors that an earlier part has made. No
        other graph of this cache may be replayed between two parts, because it may overwrite these tensors.
        """
        if rehearsing():
            if key not in self._recorded:
                finish_parts(record())
            return
        if self.holds(key):
            if self._keeping and key in self._recorded:
                self._kept.add(key)
            return
        self._make_room()
        is_warm = key in self._launch_s and self._met[key] > RECORD_AFTER
        recorded = self._captured(key, record, 0 if is_warm else WARM_UP_RUNS)
        self._launch_s.pop(key, None)
        if recorded is None:
            self._eager.add(key)
            return
        self._recorded[key] = recorded
        self._met.pop(key, None)
        if self._keeping:
            self._kept.add(key)

    def _captured(
        self, key: Hashable, record: Callable[[], Parts[Any]], warm_up_runs: int
    ) -> RecordedGraph | None:
        """Return the graphs of all parts of some work, or None if a part cannot be captured."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            free_before, _total = torch.cuda.mem_get_info()
            side = self._side_stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warm_up_runs):
                    finish_parts(record())
            torch.cuda.current_stream().wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.current_stream()
            # Until the last part has been captured, `work` keeps the tensors that later parts read.
            work, parts, ended = record(), list[GraphPart](), False
            while not ended:
                graph, number = torch.cuda.CUDAGraph(), next(self._numbers)
                if self._observer is not None:
                    self._observer.recording(number)
                # "thread_local" lets other threads use the device during the capture. Only this thread must
                # not use it.
                try:
                    with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):
                        ended, result = next_part(work)
                except RuntimeError as error:
                    torch.cuda.set_stream(stream)  # after the error, torch stays on the capture's stream
                    if self._observer is not None:
                        raise
                    why = str(error).splitlines()[0]
                    _log.warning("no CUDA graph of %s, running it eagerly: %s", key, why)
                    # Keep the graph alive: the allocator calls into the graph until the capture has ended.
                    self._broken.append(graph)
                    end_broken_capture(self._pool)
                    self._pool = None
                    return None
                if self._observer is not None:
                    self._observer.recorded(number)
                parts.append(GraphPart(number, graph))
            torch.cuda.synchronize()
            free_after, _total = torch.cuda.mem_get_info()
        self._memory_bytes += max(0, free_before - free_after)
        return RecordedGraph(parts, self._pool, result)

    def _make_room(self) -> None:
        """Drop the least recently used graphs, except permanent ones, until there is room for one more."""
        if not self._started or self._keeping:
            return
        late = [key for key in self._recorded if key not in self._kept]
        self.drop(late[: max(0, len(late) + 1 - self._max_late_graphs)])
        if len(self._eager) >= self._max_late_graphs:
            self._eager.clear()

    def _side_stream(self) -> torch.cuda.Stream:
        """Return the stream for warm-up and recording.

        All recordings use the same stream, because cuBLAS keeps a workspace per stream (32 MiB on Hopper).
        """
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._side

    def run(self, key: Hashable, record: Callable[[], Result]) -> Result:
        """Run `record` eagerly, or replay the graph recorded under `key`.

        If there is no graph for the key yet, record one first (`capture`).

        Returns:
            The result of `record`. A replay returns the tensors that were made during the recording.
        """
        if not self.enabled:
            return record()
        self.capture(key, record)
        recorded = self._recorded.get(key)
        if recorded is None:
            return record()
        self._touch(key)
        for part in recorded.parts:
            self._replay(part)
        return cast(Result, recorded.result)

    def run_parts(self, key: Hashable, record: Callable[[], Parts[Result]]) -> Parts[Result]:
        """Return the work, whose parts are replayed if `capture_parts` has recorded them.

        Otherwise, the parts run as in `run_eagerly`. The caller must do all parts. The result is as in `run`.
        """
        recorded = self._recorded.get(key)
        if recorded is not None:
            self._touch(key)
            for index, part in enumerate(recorded.parts):
                if index:
                    yield
                self._replay(part)
            return cast(Result, recorded.result)
        work, ended, seconds = record(), False, 0.0
        while not ended:
            started = time.perf_counter()
            ended, result = next_part(work)
            seconds += time.perf_counter() - started
            if not ended:
                yield
        self._ran(key, seconds)
        return cast(Result, result)

    def _replay(self, part: GraphPart) -> None:
        if self._observer is not None:
            self._observer.replaying(part.number)
        part.graph.replay()

    def _touch(self, key: Hashable) -> None:
        """Note that the graphs of a key are used."""
        if key not in self._kept:
            self._recorded[key] = self._recorded.pop(key)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Drop the CUDA graphs of these keys, e.g. because a tensor that the graphs use was replaced.

        Graphs that are recorded later reuse the memory of the dropped graphs.
        """
        keys = [key for key in keys if key in self._recorded]
        if keys and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # replays may still be in flight
        for key in keys:
            recorded = self._recorded.pop(key)
            self._kept.discard(key)
            if self._observer is not None:
                for part in recorded.parts:
                    self._observer.dropped(part.number)
        if all(one.pool is not self._pool for one in self._recorded.values()):
            self._pool = None  # torch releases a pool together with its last graph

    def clear(self) -> None:
        """Drop all graphs and free their memory."""
        if self._recorded:
            torch.cuda.synchronize(self._device)
            if self._observer is not None:
                self._observer.forgotten()
        self._recorded.clear()
        self._kept.clear()
        self._eager.clear()
        self._pool = None
        self._memory_bytes = 0
