"""Does work in pieces while no request is live: records CUDA graphs, and prepares what is not urgent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from outrider.shared.engine.graphs import GraphCache

_log = logging.getLogger("outrider.target")

Plan = Callable[[], Iterable[Callable[[], None]]]
"""Returns functions that each record one graph, or do nothing if that graph exists."""

_DONE = object()


class Rerecording:
    """The graphs that are not recorded yet, and other work for idle times.

    Engine thread only, except for `ask`.

    Args:
        graphs: The target's CUDA graphs.
    """

    def __init__(self, graphs: GraphCache) -> None:
        self._graphs = graphs
        self._plan: Plan | None = None
        self._pieces: deque[Callable[[], None]] = deque()
        self._later: deque[Iterator[object]] = deque()
        self._may_begin = False
        self._asked: list[threading.Event] = []
        self._asked_all: list[threading.Event] = []
        self._started = 0.0

    @property
    def planned(self) -> bool:
        """True if `follow` was called, so that graphs are recorded again after a change of the draft."""
        return self._plan is not None

    @property
    def waiting(self) -> bool:
        """True if work is left, or if a caller of `ask` waits for its event."""
        later = self._may_begin and self._later
        return bool(self._pieces or self._asked or later or self._asked_all)

    def ask(self, *, all_work: bool = False) -> threading.Event:
        """Return an event that is set once the graphs of the plan are recorded. Thread-safe.

        Args:
            all_work: Set the event only once the work of `later` is done, too.
        """
        asked = threading.Event()
        if all_work:
            self.begin_later()
        (self._asked_all if all_work else self._asked).append(asked)
        return asked

    def follow(self, plan: Plan) -> None:
        """Set the plan of graphs to record after each future change of the draft."""
        self._plan = plan

    def later(self, work: Iterable[object]) -> None:
        """Add work that is done after the graphs, while no request is live, and after `begin_later`.

        Args:
            work: Does one piece of the work for each item that is taken from it. Graphs that it records are
                kept.
        """
        self._later.append(iter(work))

    def begin_later(self) -> None:
        """Begin with the work of `later`, which would otherwise delay the start. Thread-safe."""
        self._may_begin = True

    def renew(self) -> None:
        """Plan all graphs again, because the draft's features have changed."""
        if self._plan is not None:
            self._started = time.monotonic()
            self._pieces = deque(self._plan())

    def record_next(self) -> None:
        """Record one graph, or do one piece of the other work. A request that arrives waits for it only."""
        if self._pieces:
            with self._graphs.keeping():
                self._pieces.popleft()()
            if not self._pieces:
                _log.info(
                    "re-recorded %d CUDA graphs in %.1f s",
                    len(self._graphs.keys),
                    time.monotonic() - self._started,
                )
        elif self._may_begin and self._later and not self._asked:
            with self._graphs.keeping():
                if next(self._later[0], _DONE) is _DONE:
                    self._later.popleft()
        if not self._pieces:
            while self._asked:
                self._asked.pop().set()
        if not self._pieces and not self._later:
            while self._asked_all:
                self._asked_all.pop().set()
