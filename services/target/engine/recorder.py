"""Decides when CUDA graphs are recorded: at start, after a change of the draft, and while no request is live.

    start       | first graphs | ready | idle for `IDLE_S`: preparation, then one further graph per step …
    new draft   | idle: first graphs, immediately | idle for `IDLE_S`: one further graph per step …

A preparation is other work that is not urgent. It is divided into parts, and one engine step does one part.
A new request therefore waits for at most one recording or one part.

While requests are live, this module records nothing. A piece of a round that has no graph then runs kernel by
kernel. `GraphCache` may record such a piece if it is used often and can be recorded quickly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from outrider.shared.base.garbage import freeze_objects
from outrider.shared.engine.graphs import GraphCache

IDLE_S = 0.25
"""Seconds without a live request after which an idle engine records the further graphs.

The pauses between two requests of one client are usually shorter.
"""

_log = logging.getLogger("outrider.target")
_DONE = object()

Recording = tuple[str, Callable[[], None]]
"""A description, and a function that records one graph or does nothing if the graph exists."""


def always(_record: Callable[[], None]) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, slots=True)
class RecordingList:
    """The CUDA graphs that an engine records in advance. Each list is in the order of recording.

    Attributes:
        first: Graphs that are recorded before the server is ready.
        further: Graphs that are recorded later, while no request is live.
    """

    first: list[Recording]
    further: list[Recording]


class GraphRecorder:
    """Records an engine's CUDA graphs in advance, one at a time. Engine thread only, except for `ask`.

    All graphs that the recorder records are kept. `GraphCache` limits only the number of graphs that are
    recorded while requests are live.

    Args:
        graphs: The cache of the target's CUDA graphs.
        idle_s: Seconds without a live request after which further graphs are recorded.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, graphs: GraphCache, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._graphs = graphs
        self._idle_s = idle_s
        self._clock = clock
        self._list: Callable[[], RecordingList] | None = None
        self._first: deque[Recording] = deque()
        self._further: deque[Recording] = deque()
        self._preparations: deque[Iterator[object]] = deque()
        self._is_compiled: Callable[[Callable[[], None]], bool] = always
        # Whether the kernels of the next further graph are compiled, and for how many graphs in a row some
        # kernels were not compiled yet.
        self._checked, self._uncompiled = False, 0
        # Callers of `ask`, each with `for_all`: those not noted by `hear` yet, and those already noted.
        self._asked: deque[tuple[threading.Event, bool]] = deque()
        self._heard: list[tuple[threading.Event, bool]] = []
        self._started = 0.0
        self._live_until = -idle_s

    @property
    def planned(self) -> bool:
        """True if `follow` was called, so that graphs are recorded again after a change of the draft."""
        return self._list is not None

    @property
    def enabled(self) -> bool:
        """True if passes are recorded as CUDA graphs, which only a GPU can do."""
        return self._graphs.enabled

    @property
    def num_first(self) -> int:
        """Number of first graphs that are left to record."""
        return len(self._first)

    @property
    def num_further(self) -> int:
        """Number of further graphs that are left to record."""
        return len(self._further)

    @property
    def next_due(self) -> float | None:
        """Time at which the next work may be done unless a request is live. None if no work is left."""
        if self._first or self._asked or self._heard:
            return self._live_until
        return self._live_until + self._idle_s if self._further or self._preparations else None

    def is_due(self) -> bool:
        """Return True if `record_next` has work, provided that no request is live."""
        due = self.next_due
        return due is not None and self._clock() >= due

    def ask(self, *, for_all: bool = False) -> threading.Event:
        """Return an event that is set once the first CUDA graphs are recorded. May be called from any thread.

        Args:
            for_all: True to set the event only after the further graphs and the preparations, too. If no
                request is live, the engine then does this work without waiting for `idle_s`.
        """
        asked = threading.Event()
        self._asked.append((asked, for_all))
        return asked

    def hear(self) -> None:
        """Accept the calls of `ask` since the last call of `hear`.

        Call this method before each check for a new draft. The draft may have changed just before a call of
        `ask`. The event of this call is therefore set only after the next check has ended.
        """
        while self._asked:
            self._heard.append(self._asked.popleft())

    def prepare(self, work: Iterable[object]) -> None:
        """Add a preparation: work that is done before the further graphs, while no request is live.

        Args:
            work: Iterable that does one part of the work each time it yields an item. All CUDA graphs that
                the work records are kept.
        """
        self._preparations.append(iter(work))

    def follow(
        self,
        listed: Callable[[], RecordingList],
        is_compiled: Callable[[Callable[[], None]], bool] = always,
    ) -> None:
        """Set the CUDA graphs to record in advance: now, and again after each change of the draft.

        Args:
            listed: Function that lists the graphs.
            is_compiled: Function that returns True if the kernels of a further graph are compiled. False
                means that they are being compiled in the background. Another graph is then recorded first.
        """
        self._list, self._is_compiled = listed, is_compiled
        self.renew()

    def renew(self) -> None:
        """Plan to record all listed graphs. A graph that already exists takes no time."""
        if self._list is None:
            return
        listed = self._list()
        self._first, self._further = deque(listed.first), deque(listed.further)
        self._checked, self._uncompiled = False, 0
        self._started = self._clock()

    def forget(self) -> None:
        """Record no graph any more, because the process must end."""
        self._list = None
        self._first.clear()
        self._further.clear()
        self._preparations.clear()

    def live(self) -> None:
        """Note that a request is live now."""
        self._live_until = self._clock()

    def record_next(self) -> str:
        """Record one CUDA graph, check that a graph's kernels are compiled, or do one part of a preparation.

        Returns:
            The description of the recorded graph. Empty if none was recorded.
        """
        description = ""
        if self._first:
            description = self._record(self._first)
            if not self._first:
                self._report("first" if self._further else "all")
        elif self._preparations:
            with self._graphs.keeping():
                if next(self._preparations[0], _DONE) is _DONE:
                    self._preparations.popleft()
        elif self._further and (self._checked or self._check()):
            self._checked = False
            description = self._record(self._further)
            if not self._further:
                self._report("all")
                freeze_objects()
        for one in list(self._heard):
            asked, for_all = one
            if not self._first and not (for_all and (self._further or self._preparations)):
                asked.set()
                self._heard.remove(one)
        return description

    def _record(self, queue: deque[Recording]) -> str:
        description, record = queue.popleft()
        with self._graphs.keeping():
            record()
        return description

    def _check(self) -> bool:
        """Return True if the next further graph may be recorded in this step.

        The check takes about as long as a recording, so the graph is recorded in the next step.
        """
        if self._is_compiled is always:
            return True
        self._checked = self._is_compiled(self._further[0][1])
        if self._checked:
            self._uncompiled = 0
            return False
        self._further.rotate(-1)
        self._uncompiled += 1
        if self._uncompiled >= len(self._further):
            self._uncompiled = 0
            self.live()  # wait as long as after a request
        return False

    def _report(self, which: str) -> None:
        _log.info(
            "%s CUDA graphs recorded: %d graphs, %d MiB, %.1f s",
            which,
            len(self._graphs.keys),
            round(self._graphs.memory_bytes / 2**20),
            self._clock() - self._started,
        )
