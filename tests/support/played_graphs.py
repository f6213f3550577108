"""Caches of graphs for machines without CUDA: they replay by running again, and remember what was captured and run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

from outrider.shared.engine.graphs import GraphCache, RecordedGraph


class PlayedGraphs(GraphCache):
    """As on CUDA, a key has to be captured before it is replayed; `captured` and `runs` list the keys in order."""

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


class Observed:
    """Hears of graphs, and remembers those that were dropped."""

    def __init__(self) -> None:
        self.gone: list[int] = []

    def recording(self, graph: int) -> None:
        """See `GraphObserver.recording`."""

    def recorded(self, graph: int) -> None:
        """See `GraphObserver.recorded`."""

    def replaying(self, graph: int) -> None:
        """See `GraphObserver.replaying`."""

    def dropped(self, graph: int) -> None:
        """See `GraphObserver.dropped`."""
        self.gone.append(graph)

    def forgotten(self) -> None:
        """See `GraphObserver.forgotten`."""


class BoundedGraphs(GraphCache):
    """Keeps and drops as on CUDA; `captured` lists all keys in order, with those that were recorded again."""

    def __init__(self, max_late_graphs: int) -> None:
        self.observer = Observed()
        super().__init__("cpu", observer=self.observer, max_late_graphs=max_late_graphs)
        self.enabled = True
        self.captured: list[Hashable] = []

    @property
    def pool(self) -> object:
        """What the next graph is captured into."""
        return self._pool

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        super().run(key, record)
        return record()

    def _captured(self, key: Hashable, record: Callable[[], Any]) -> RecordedGraph | None:
        self.captured.append(key)
        self._pool = self._pool or object()
        graph: Any = SimpleNamespace(replay=lambda: None)
        return RecordedGraph(len(self.captured), graph, self._pool, record())
