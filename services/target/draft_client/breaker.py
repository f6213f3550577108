"""The circuit breaker between the engine and a draft that does not answer."""

from __future__ import annotations

from enum import Enum

MISSES_TO_OPEN = 3
FIRST_BACKOFF_S = 0.1
LAST_SLOW_BACKOFF_S = 0.2
LAST_FAULTY_BACKOFF = 10.0
"""Fault deadlines: what rows that wait as long as it takes lose to a draft that answers pings and nothing else stays below a tenth."""


class BreakerState(Enum):
    """CLOSED: drafting. OPEN: the draft is not asked. HALF_OPEN: it showed life, one sequence tries."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after three missed deadlines in a row, or at once on a fault; a sign of life after the back-off makes it half-open.

    Missed deadlines may mean that the draft is too slow to be worth waiting for, so `faulty` tells the two apart: rows that wait as
    long as it takes are refused by a faulty draft only. `sign_of_life` may come from another thread: it only moves OPEN to HALF_OPEN.

    The first fault may be a pause of the draft: it is asked again as soon as it shows life. Each further one without an answer in between
    costs another deadline, so the back-off starts at one deadline then and doubles.

    Args:
        fault_deadline_s: How long a faulty draft is waited for before `trip` is called.

    Attributes:
        fault_deadline_s: As given.
        faults: How many in a row, over all connections.
    """

    def __init__(self, fault_deadline_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.faulty = False
        self.faults = 0
        self.fault_deadline_s = fault_deadline_s
        self._misses = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._closed_until = 0.0

    def miss(self, now: float) -> None:
        """A deadline passed without an answer."""
        self._misses += 1
        if self.state is BreakerState.HALF_OPEN:
            self._backoff_s = max(self._backoff_s, min(2 * self._backoff_s, LAST_SLOW_BACKOFF_S))
        elif self._misses < MISSES_TO_OPEN:
            return
        self._open(now)

    def trip(self, now: float) -> None:
        """Open at once: the draft is faulty."""
        self.faulty = True
        self.faults += 1
        if self.faults > 1:
            grown = max(2 * self._backoff_s, self.fault_deadline_s)
            self._backoff_s = min(grown, LAST_FAULTY_BACKOFF * self.fault_deadline_s)
        self._open(now)

    @property
    def refuses_all(self) -> bool:
        """Whether even rows that wait as long as it takes must do without the draft."""
        return self.faulty and self.state is BreakerState.OPEN

    def _open(self, now: float) -> None:
        self._misses = 0
        self._closed_until = now + self._backoff_s
        self.state = BreakerState.OPEN

    def success(self) -> None:
        """An answer came in time."""
        self.reset()
        self.faults = 0
        self._backoff_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        """A new connection, which may be to another draft: it is tried, but what faults there were is remembered until it answers."""
        self._misses = 0
        self.faulty = False
        self.state = BreakerState.CLOSED

    def wants_probe(self, now: float) -> bool:
        """Whether the draft should be asked for a sign of life."""
        return self.state is BreakerState.OPEN and now >= self._closed_until

    def sign_of_life(self, now: float) -> None:
        """The draft answered a probe."""
        if self.wants_probe(now):
            self.state = BreakerState.HALF_OPEN
