"""A `GraphCache` for machines without CUDA: it replays by running again, and remembers what was captured and run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from outrider.shared.engine.graphs import GraphCache


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
