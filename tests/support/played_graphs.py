"""Graph caches for machines without CUDA: a replay runs the function again. They list captures and runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

from outrider.shared.engine.graphs import GraphCache, RecordedGraph


class PlayedGraphs(GraphCache):
    """Requires a capture before a replay, as CUDA does. `captured` and `runs` list the keys in order."""

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
    """A `GraphObserver` that lists the graphs that were dropped."""

    def __init__(self) -> None:
        self.gone: list[int] = []

    def recording(self, graph: int) -> None:
        """Do nothing."""

    def recorded(self, graph: int) -> None:
        """Do nothing."""

    def replaying(self, graph: int) -> None:
        """Do nothing."""

    def dropped(self, graph: int) -> None:
        """Add the graph to `gone`."""
        self.gone.append(graph)

    def forgotten(self) -> None:
        """Do nothing."""


class BoundedGraphs(GraphCache):
    """Keeps and drops graphs as on CUDA. `captured` lists all keys in order, a recaptured key again."""

    def __init__(self, most_late: int) -> None:
        self.observer = Observed()
        super().__init__("cpu", observer=self.observer, most_late=most_late)
        self.enabled = True
        self.captured: list[Hashable] = []

    @property
    def pool(self) -> object:
        """Memory pool for the next capture."""
        return self._pool

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        super().run(key, record)
        return record()

    def _captured(self, key: Hashable, record: Callable[[], Any]) -> RecordedGraph | None:
        self.captured.append(key)
        self._pool = self._pool or object()
        graph: Any = SimpleNamespace(replay=lambda: None)
        return RecordedGraph(len(self.captured), graph, self._pool, record())
