"""Graph caches for machines without CUDA: a replay calls the function again. The calls are listed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.recorded_graph import GraphObserver, GraphPart, Parts, RecordedGraph, next_part


class PlayedGraphs(GraphCache):
    """Replays a key only if it was captured, as on CUDA. `captured` and `runs` list the keys in order."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.enabled = True
        self.captured: list[Hashable] = []
        self.runs: list[Hashable] = []

    def replays(self, key: Hashable) -> bool:
        return key in self.captured

    def capture(self, key: Hashable, record: Callable[[], Any]) -> None:
        self.captured.append(key)
        record()

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        self.runs.append(key)
        return record()


class Observed(GraphObserver):
    """Records the numbers of replayed and of dropped graphs."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.gone: list[int] = []

    def recording(self, graph: int) -> None:
        """Do nothing."""

    def recorded(self, graph: int) -> None:
        """Do nothing."""

    def replaying(self, graph: int) -> None:
        self.replayed.append(graph)

    def dropped(self, graph: int) -> None:
        self.gone.append(graph)

    def forgotten(self) -> None:
        """Do nothing."""


class BoundedGraphs(GraphCache):
    """Keeps and drops graphs as on CUDA.

    `captured` lists the key of every capture, also of repeated ones, and `warm_up_runs` the runs before each.
    """

    def __init__(self, max_late_graphs: int) -> None:
        self.observer = Observed()
        # On a busy machine, a pass on the CPU can take any time.
        super().__init__(
            "cpu", observer=self.observer, max_late_graphs=max_late_graphs, most_late_s=float("inf")
        )
        self.enabled = True
        self.captured: list[Hashable] = []
        self.warm_up_runs: list[int] = []

    @property
    def pool(self) -> object:
        """The memory pool of the next capture."""
        return self._pool

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        super().run(key, record)
        return record()

    def run_parts(self, key: Hashable, record: Callable[[], Parts[Any]]) -> Parts[Any]:
        """Do the parts again, while the graphs count as replayed."""
        if key not in self._recorded:
            return (yield from super().run_parts(key, record))
        work, ended, result = record(), False, None
        replay = super().run_parts(key, record)
        while not ended:
            ended, result = next_part(work)
            assert next_part(replay)[0] is ended, "the work must have as many parts as when it was recorded"
            if not ended:
                yield
        return result

    def _captured(
        self, key: Hashable, record: Callable[[], Parts[Any]], warm_up_runs: int
    ) -> RecordedGraph | None:
        self.captured.append(key)
        self.warm_up_runs.append(warm_up_runs)
        self._pool = self._pool or object()
        graph: Any = SimpleNamespace(replay=lambda: None)
        work, parts, ended, result = record(), list[GraphPart](), False, None
        while not ended:
            ended, result = next_part(work)
            parts.append(GraphPart(len(self.captured), graph))
        return RecordedGraph(parts, self._pool, result)
