"""Measures how long the draft service takes to answer, and derives how long rounds wait for its trees.

An answer is a *stall* if it took more than `STALL_MULTIPLE` times the median. A stall or a late answer is not
recorded. Otherwise, the waits would grow for a draft that sometimes stops: each longer wait would admit a
longer stall. Several such answers in a row show that the draft has become slower. They are recorded from the
`LATES_TO_COUNT`-th on. Answers that were due at the same time count once, because one stop of the draft
delays the trees of all sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

ANSWERS_KEPT = 256
ANSWERS_TO_JUDGE = 8
"""Number of answers to measure before their times limit a wait. The first answers are slow, because caches
and kernels are cold."""
LATES_TO_COUNT = 3
STALL_MULTIPLE = 4.0
"""An answer that took longer than this multiple of the median is a stall, unless it took at most
`OTHERS_FLOOR_S`."""
WAIT_MULTIPLE = 4.0
"""Longest wait of a row in mode `on`, as a multiple of the 99th percentile of the measured times."""
FLOOR_SHARE = 0.125
"""Share of the fault deadline that a row in mode `on` may always wait: 0.25 s with the default deadline."""
OTHERS_MULTIPLE = 2.0
"""Longest time for which the other rows of a round wait for rows in mode `on`, as a multiple of the 99th
percentile of the measured times."""
OTHERS_FLOOR_S = 0.01
"""Lower bound of the time for which those other rows wait, in seconds."""
EXCHANGE_FLOOR_S = 0.05
"""Lower bound, in seconds, of the time for which a round on the device waits for its trees.

It is higher than `OTHERS_FLOOR_S`, because a late tree costs more in such a round: All sessions of the round
must be opened again, and the next rounds run through the host."""


class AnswerTimes:
    """Measured times, in seconds, from a request for a draft tree to the draft's answer. Engine thread only.

    Args:
        fault_deadline_s: Upper limit of every wait for an answer, in seconds. Until enough answers have been
            measured, all limits are derived from this value.
    """

    def __init__(self, fault_deadline_s: float) -> None:
        self._fault_deadline_s = fault_deadline_s
        self._times: deque[float] = deque()
        # The same times in ascending order.
        self._ordered: list[float] = []
        # Number of late answers in a row, and the time when the last of them arrived.
        self._lates = 0
        self._late_at = float("-inf")

    def in_time(self, seconds: float, now: float) -> None:
        """Record an answer that has arrived now, while a row was waiting for it."""
        if self.is_stall(seconds):
            self.late(seconds, now)
            return
        self._lates = 0
        self._record(seconds)

    def late(self, seconds: float, now: float) -> None:
        """Record an answer that has arrived now, and for which no row was waiting any more."""
        if now - seconds < self._late_at:
            return  # it was requested before the last late answer arrived
        self._late_at = now
        self._lates += 1
        if self._lates >= LATES_TO_COUNT:
            self._record(min(seconds, self._fault_deadline_s))

    def is_stall(self, seconds: float) -> bool:
        """Return True if an answer took much longer than usual. False before enough answers are measured."""
        return self.median is not None and seconds > self._longest_usual()

    @property
    def median(self) -> float | None:
        """Median of the recent times; None before enough answers are measured."""
        return self._quantile(0.5)

    @property
    def p99(self) -> float | None:
        """99th percentile of the recent times; None before enough answers are measured."""
        return self._quantile(0.99)

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

    @property
    def exchange_s(self) -> float:
        """Longest wait of a round on the device for its trees, if not all its rows are in mode `on`."""
        return min(self.limit_s, max(EXCHANGE_FLOOR_S, self.others_s))

    def _quantile(self, share: float) -> float | None:
        count = len(self._ordered)
        return self._ordered[min(count - 1, int(count * share))] if count >= ANSWERS_TO_JUDGE else None

    def _longest_usual(self) -> float:
        return max(OTHERS_FLOOR_S, STALL_MULTIPLE * self._ordered[len(self._ordered) // 2])

    def _record(self, seconds: float) -> None:
        self._times.append(seconds)
        insort(self._ordered, seconds)
        if len(self._times) > ANSWERS_KEPT:
            del self._ordered[bisect_left(self._ordered, self._times.popleft())]
        elif len(self._times) == ANSWERS_TO_JUDGE:
            # The draft may have stopped during the first answers. Other answers must replace such stalls.
            longest_s = self._longest_usual()
            self._times = deque(one for one in self._times if one <= longest_s)
            self._ordered = sorted(self._times)
