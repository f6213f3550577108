"""Measures how long the draft service takes to answer, and derives how long rounds wait for its trees.

A single late answer is not recorded. Otherwise, the waits would grow for a draft that sometimes stops.
Several late answers in a row show that the draft has become slower. They are recorded from the
`LATES_TO_COUNT`-th on.
"""

from __future__ import annotations

from collections import deque

ANSWERS_KEPT = 256
ANSWERS_TO_JUDGE = 8
"""Number of answers to measure before their times limit a wait. The first answers are slow, because caches
and kernels are cold."""
LATES_TO_COUNT = 3
WAIT_MULTIPLE = 4.0
"""Longest wait of a row in mode `on`, as a multiple of the 99th percentile of the measured times."""
FLOOR_SHARE = 0.125
"""Share of the fault deadline that a row in mode `on` may always wait: 0.25 s with the default deadline."""
OTHERS_MULTIPLE = 2.0
"""Longest time for which the other rows of a round wait for rows in mode `on`, as a multiple of the 99th
percentile of the measured times."""
OTHERS_FLOOR_S = 0.01
"""Lower bound of the time for which those other rows wait, in seconds."""


class AnswerTimes:
    """Measured times, in seconds, from a request for a draft tree to the draft's answer. Engine thread only.

    Args:
        fault_deadline_s: Upper limit of every wait for an answer, in seconds. Until enough answers have been
            measured, all limits are derived from this value.
    """

    def __init__(self, fault_deadline_s: float) -> None:
        self._fault_deadline_s = fault_deadline_s
        self._times: deque[float] = deque(maxlen=ANSWERS_KEPT)
        self._lates = 0
        self._p99: float | None = None

    def in_time(self, seconds: float) -> None:
        """Record an answer that arrived while a row was waiting for it."""
        self._lates = 0
        self._record(seconds)

    def late(self, seconds: float) -> None:
        """Record an answer for which no row was waiting any more."""
        self._lates += 1
        if self._lates >= LATES_TO_COUNT:
            self._record(min(seconds, self._fault_deadline_s))

    @property
    def p99(self) -> float | None:
        """99th percentile of the recent times; None before enough answers are measured."""
        if self._p99 is None and len(self._times) >= ANSWERS_TO_JUDGE:
            ordered = sorted(self._times)
            self._p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return self._p99

    @property
    def limit_s(self) -> float:
        """Longest time for which a row in mode `on` waits for its trees."""
        if self.p99 is None:
            return self._fault_deadline_s
        floor = FLOOR_SHARE * self._fault_deadline_s
        return min(self._fault_deadline_s, max(floor, WAIT_MULTIPLE * self.p99))

    @property
    def others_s(self) -> float:
        """Longest wait of a round for the trees of rows in mode `on`, if the round also has other rows."""
        if self.p99 is None:
            return FLOOR_SHARE * self._fault_deadline_s
        return min(self.limit_s, max(OTHERS_FLOOR_S, OTHERS_MULTIPLE * self.p99))

    def _record(self, seconds: float) -> None:
        self._times.append(seconds)
        self._p99 = None
