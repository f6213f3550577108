"""CUDA graphs by key: the first call of a key records it, later ones replay it. Without CUDA the same code simply runs.

A graph replays fixed addresses. So a recorded function reads its inputs from tensors that never move, takes every host number that
shapes its work from its key, waits for nothing, and returns tensors that the next replay overwrites.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

import torch

from outrider.kernels.ahead import rehearsing

WARM_UP_RUNS = 2
"""Eager runs before a capture: Triton compiles, cuBLAS makes its workspaces, caches of addresses fill."""
MOST_LATE = 96
"""Graphs that are kept beside those of the start: more than are in use at a time, and few beside the memory of a model."""
RECORD_AFTER = 8
"""Eager runs of a key that was not recorded at the start, before it is: a recording takes as long as some tens of rounds."""

Result = TypeVar("Result")

_log = logging.getLogger("outrider.engine")


class GraphObserver(Protocol):
    """Hears of every graph before it is recorded or replayed: with tensor parallelism the other ranks do the same with theirs."""

    def recording(self, graph: int) -> None:
        """What runs from now on is captured as graph number `graph`."""
        ...

    def recorded(self, graph: int) -> None:
        """The capture is complete."""
        ...

    def replaying(self, graph: int) -> None:
        """The graph is about to be launched."""
        ...

    def dropped(self, graph: int) -> None:
        """One graph is dropped."""
        ...

    def forgotten(self) -> None:
        """All graphs are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """One graph: its number for the observer, the memory pool that it was captured into, and what the function returned."""

    number: int
    graph: torch.cuda.CUDAGraph
    pool: Any
    result: Any


class GraphCache:
    """Graphs of one device. They share one memory pool, so they must be replayed on one stream, one after the other.

    What `run` returns is valid until the next `run` or `capture` of *any* key of this cache: another graph may keep its intermediate
    values at the same addresses. What must outlive that is copied, within the function, to a tensor made outside of it.

    What is recorded within `keeping`, at a start, stays. Once that is over, only so many others are kept, those used last: which keys come
    up is for clients to say, and a service must not grow by that.

    Args:
        device: Where the functions run.
        enabled: False runs every function eagerly on CUDA too.
        observer: Hears of every graph, or None.
        most_late: Graphs that are kept beside those of `keeping`.
    """

    def __init__(
        self,
        device: torch.device | str,
        enabled: bool = True,
        observer: GraphObserver | None = None,
        most_late: int = MOST_LATE,
    ) -> None:
        self._device = torch.device(device)
        self.enabled = enabled and self._device.type == "cuda"
        self._observer = observer
        self._numbers = count()
        self._recorded: dict[
            Hashable, RecordedGraph
        ] = {}  # the one used last is the last, but for those that are kept
        self._kept: set[Hashable] = set()
        self._most_late = most_late
        self._keeping = False
        self._started = False
        self._met: Counter[Hashable] = Counter()
        self._eager: set[Hashable] = set()
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._memory_bytes = 0

    @property
    def device(self) -> torch.device:
        """Where the functions run."""
        return self._device

    @property
    def observed(self) -> bool:
        """Whether somebody hears of every graph."""
        return self._observer is not None

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What is recorded: what is kept first, in its order, and of the rest last what was used last."""
        return tuple(self._recorded)

    @property
    def memory_bytes(self) -> int:
        """Device memory that the recordings took, with what the runs before them left: workspaces, compiled kernels.

        By the device's free memory, as the allocator does not see a graph's own structures; what other processes took meanwhile is in it.
        """
        return self._memory_bytes

    def holds(self, key: Hashable) -> bool:
        """Whether `run` with this key would not have to record; always true where nothing is recorded."""
        return not self.enabled or key in self._recorded or key in self._eager

    def replays(self, key: Hashable) -> bool:
        """Whether `run` with this key would replay a graph."""
        return key in self._recorded

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep for good what is recorded in here, until it is dropped. From the end of the first such block on others are bounded."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping, self._started = False, True

    def due(self, key: Hashable, counted_as: Hashable | None = None) -> bool:
        """Return whether the caller should pass the function to `run` now; if not, it runs the function eagerly.

        A key that was not recorded at start-up is recorded after it has come up `RECORD_AFTER` times, when the recording pays.

        Args:
            key: The key of `run`.
            counted_as: Counts the occurrences, for several keys that are recorded for the same reason; None counts `key` itself.
        """
        if not self._started or self.holds(key):
            return True
        if len(self._met) > 8 * self._most_late:  # keys that came up a few times, long ago
            self._met.clear()
        counted = key if counted_as is None else counted_as
        self._met[counted] += 1
        return self._met[counted] > RECORD_AFTER

    def expect(self, counted_as: Hashable) -> None:
        """Make every key that is counted as this one due at its first occurrence."""
        self._met[counted_as] = RECORD_AFTER

    def capture(self, key: Hashable, record: Callable[[], Any]) -> None:
        """Record `key` unless it is recorded already; nothing happens on a CPU.

        `record` runs `WARM_UP_RUNS` times for real. Call this while the static inputs hold idle rows (lengths 0, slots -1), so that
        those runs store nothing that anybody reads. Waits for the device. What cannot be captured, because it asks the device something,
        is logged and runs eagerly from then on. In a rehearsal (`kernels.ahead`) `record` runs once, even where nothing is ever recorded,
        and nothing is kept.
        """
        if rehearsing():
            if key not in self._recorded:
                record()
            return
        if self.holds(key):
            if self._keeping and key in self._recorded:
                self._kept.add(key)
            return
        self._make_room()
        recorded = self._captured(key, record)
        if recorded is None:
            self._eager.add(key)
            return
        self._recorded[key] = recorded
        self._met.pop(key, None)
        if self._keeping:
            self._kept.add(key)

    def _captured(self, key: Hashable, record: Callable[[], Any]) -> RecordedGraph | None:
        """Return the graph of a function, or None if it cannot be captured."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            free_before, _total = torch.cuda.mem_get_info()
            side = self._side_stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    record()
            torch.cuda.current_stream().wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph, number = torch.cuda.CUDAGraph(), next(self._numbers)
            if self._observer is not None:
                self._observer.recording(number)
            stream = torch.cuda.current_stream()
            # Other threads may use the device meanwhile: only this one must not.
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    result = record()
            except RuntimeError as error:
                torch.cuda.set_stream(stream)  # torch stays on the capture's
                if self._observer is not None:
                    raise
                _log.warning("no CUDA graph of %s, running it eagerly: %s", key, str(error).splitlines()[0])
                self._give_up(graph)
                return None
            if self._observer is not None:
                self._observer.recorded(number)
            torch.cuda.synchronize()
            free_after, _total = torch.cuda.mem_get_info()
        self._memory_bytes += max(0, free_before - free_after)
        return RecordedGraph(number, graph, self._pool, result)

    def _make_room(self) -> None:
        """Drop those that were used longest ago, but for what is kept, until there is room for one more."""
        if not self._started or self._keeping:
            return
        late = [key for key in self._recorded if key not in self._kept]
        self.drop(late[: max(0, len(late) + 1 - self._most_late)])
        if len(self._eager) >= self._most_late:
            self._eager.clear()

    def _side_stream(self) -> torch.cuda.Stream:
        """Return the stream for warming up and recording, always the same: cuBLAS keeps a workspace (32 MiB on Hopper) for every one."""
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._side

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave a capture that broke: torch goes no further than the error, and its allocator and generator would wait for the end."""
        torch.cuda.synchronize()
        # The allocator asks the graph whether allocations are its own for as long as it takes the capture for one that goes on.
        self._broken.append(graph)
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # some versions end that before the error
            torch._C._cuda_endAllocateToPool(device, self._pool)
        self._pool = None
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())

    def run(self, key: Hashable, record: Callable[[], Result]) -> Result:
        """Run `record`: eagerly, or by replaying what was recorded under `key` (recorded now if it is new, see `capture`).

        Returns:
            What `record` returned: of a graph, the tensors made while it was recorded.
        """
        if not self.enabled:
            return record()
        self.capture(key, record)
        recorded = self._recorded.get(key)
        if recorded is None:
            return record()
        if key not in self._kept:
            self._recorded[key] = self._recorded.pop(key)
        if self._observer is not None:
            self._observer.replaying(recorded.number)
        recorded.graph.replay()
        result: Result = recorded.result
        return result

    def drop(self, keys: Collection[Hashable]) -> None:
        """Forget these graphs, e.g. because a tensor that they hold was replaced; their memory is there for the next ones."""
        keys = [key for key in keys if key in self._recorded]
        if keys and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # they may be on their way
        for key in keys:
            recorded = self._recorded.pop(key)
            self._kept.discard(key)
            if self._observer is not None:
                self._observer.dropped(recorded.number)
        if all(one.pool is not self._pool for one in self._recorded.values()):
            self._pool = None  # torch gives up a pool with its last graph

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        if self._recorded:
            torch.cuda.synchronize(self._device)
            if self._observer is not None:
                self._observer.forgotten()
        self._recorded.clear()
        self._kept.clear()
        self._eager.clear()
        self._pool = None
        self._memory_bytes = 0
