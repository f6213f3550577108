"""Graphs that are recorded anew while a target serves: those that a change of its draft made void, one at a time when nobody is served."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from outrider.shared.engine.graphs import GraphCache

_log = logging.getLogger("outrider.target")

Plan = Callable[[], Iterable[Callable[[], None]]]
"""Makes the pieces of a recording; those that are recorded already take no time."""


class Rerecording:
    """Engine thread only, but for `ask`.

    Args:
        graphs: Of the target.
    """

    def __init__(self, graphs: GraphCache) -> None:
        self._graphs = graphs
        self._plan: Plan | None = None
        self._pieces: deque[Callable[[], None]] = deque()
        self._asked: list[threading.Event] = []
        self._started = 0.0

    @property
    def planned(self) -> bool:
        """Whether anything would be recorded after a change."""
        return self._plan is not None

    @property
    def waiting(self) -> bool:
        """Whether something is left to record, or somebody wants to hear that nothing is."""
        return bool(self._pieces or self._asked)

    def ask(self) -> threading.Event:
        """Return what is set when nothing is left to record. Any thread."""
        asked = threading.Event()
        self._asked.append(asked)
        return asked

    def follow(self, plan: Plan) -> None:
        """Record what `plan` says after every change from now on."""
        self._plan = plan

    def renew(self) -> None:
        """Begin again: the draft's features have changed."""
        if self._plan is not None:
            self._started = time.monotonic()
            self._pieces = deque(self._plan())

    def record_next(self) -> None:
        """Record one piece, if there is one; a request that comes meanwhile waits for no more than that."""
        if self._pieces:
            with self._graphs.keeping():
                self._pieces.popleft()()
            if not self._pieces:
                _log.info(
                    "CUDA graphs recorded anew: %d in %.1f s",
                    len(self._graphs.keys),
                    time.monotonic() - self._started,
                )
        if not self._pieces:
            while self._asked:
                self._asked.pop().set()
