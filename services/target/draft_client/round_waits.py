"""Limits the share of time that rounds on the device lose by waiting for a draft that stops or is slow.

A round on the device cannot leave a row out. A row in mode `on` therefore holds up all other rows of its
round until its tree arrives or the round's limit is reached (`AnswerTimes.exchange_s`). The time that the
other rows lose is charged to the budget that also limits waits for trees from the host (`Breaker.budget`):

- A round without trees in time is charged with its whole wait.
- A round whose trees were a stall (see `AnswerTimes`) is charged with the time beyond the median.

While the budget is used up, rounds run through the host, where rows in mode `on` wait alone. After a late
round, rounds also run through the host for a pause. The pauses grow if late rounds are repeated. Afterwards,
rounds on the device resume.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from outrider.services.target.draft_client.answer_times import AnswerTimes
from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.exchange_blobs import BoundedTreeExchange

FIRST_PAUSE_S = 0.1
"""Pause in seconds after the first late or refused round, during which rounds run through the host.

Each further pause is twice as long, up to `LAST_PAUSE_S`.
"""
LAST_PAUSE_S = 5.0
"""Longest pause in seconds."""
GOOD_ROUNDS = 64
"""Number of rounds of a series without a late round after which pauses start again at `FIRST_PAUSE_S`."""

_log = logging.getLogger("outrider.target.draft")


class RoundWaits:
    """Judges the waits of rounds on the device with one draft service. Engine thread only.

    All times are from `time.monotonic()`, in seconds.

    Args:
        times: Measured times of the draft's answers. Receives the times of rounds on the device.
        breaker: Circuit breaker of the draft. Receives late rounds, and owns the budget.
        on_fault: Called when a round was late in which only rows in mode `on` waited. Its argument is the
            wait in seconds.
    """

    def __init__(self, times: AnswerTimes, breaker: Breaker, on_fault: Callable[[float], None]) -> None:
        self._times = times
        self._breaker = breaker
        self._on_fault = on_fault
        # Rounds of the current series that the host has not read yet.
        self._in_flight: deque[BoundedTreeExchange] = deque()
        self._good_rounds = 0
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0

    def allow(self, now: float) -> bool:
        """Return True if a round on the device may begin now."""
        return now >= self._not_before and not self._breaker.budget.empty_s(now)

    def begun(self, started: BoundedTreeExchange) -> None:
        """Record that a round has begun."""
        self._in_flight.append(started)

    def read(self, number: int) -> BoundedTreeExchange | None:
        """Return the round with this number, which the host has read. None if its series has ended."""
        while self._in_flight and self._in_flight[0].number < number:
            self._in_flight.popleft()
        if self._in_flight and self._in_flight[0].number == number:
            return self._in_flight.popleft()
        return None

    def in_time(self, started: BoundedTreeExchange, waited_s: float, now: float) -> None:
        """Record a round whose trees have arrived within its limit."""
        self._breaker.success(now)
        self._good_rounds += 1
        if self._good_rounds >= GOOD_ROUNDS:
            self._pause_s = FIRST_PAUSE_S
        if started.may_be_slow:
            return
        median_s = self._times.median
        if not started.patient and median_s is not None and self._times.is_stall(waited_s):
            self._breaker.budget.spend(waited_s - median_s, now)
        self._times.in_time(waited_s, now)

    def late(self, started: BoundedTreeExchange | None, waited_s: float, now: float) -> None:
        """Record that a wait for trees has ended without trees.

        Args:
            started: The round that the host has read last. None if the host has not read the late round.
            waited_s: How long the round of `started` has waited.
            now: The current time.
        """
        # The channel does not report which round was late. A round that has waited for less than its limit
        # was in time, unless its trees were invalid.
        if self._in_flight and (started is None or waited_s < started.limit_s):
            started = self._in_flight[0]
            waited_s = started.limit_s
        self.pause("trees arrived late", now)
        if started is None:
            return
        if started.patient:
            self._on_fault(waited_s)
        else:
            self._breaker.budget.spend(waited_s, now)
            self._breaker.miss(now)

    def pause(self, reason: str, now: float) -> None:
        """Let rounds run through the host for a while. The pauses of a series of failures grow."""
        _log.info("running rounds through the host for %.1f s: %s", self._pause_s, reason)
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def end_series(self) -> None:
        """Forget the rounds in flight, whose series has ended."""
        self._in_flight.clear()
        self._good_rounds = 0
