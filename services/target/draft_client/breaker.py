"""Circuit breaker for a draft that misses deadlines: stops asking it, backs off, and tries it again."""

from __future__ import annotations

from enum import Enum

MISSES_TO_OPEN = 3
FIRST_BACKOFF_S = 0.1
LAST_SLOW_BACKOFF_S = 0.2
LAST_FAULTY_BACKOFF = 10.0
"""Longest back-off of a faulty draft, in fault deadlines.

If a draft answers pings but nothing else, rows without a deadline then lose less than a tenth of their time.
"""


class BreakerState(Enum):
    """CLOSED: the draft is asked. OPEN: it is not. HALF_OPEN: it answered a ping; one sequence tries it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after three missed deadlines in a row, or immediately on a fault.

    After a back-off, a sign of life (an answered ping) makes it half-open; an answer in time closes it.

    A missed deadline may only mean that the draft is too slow to be worth waiting for. `faulty` marks the
    other case: rows without a deadline give up on the draft only if it is faulty.

    The first fault may be a short pause of the draft, so it is asked again as soon as it shows life. Each
    further fault without an answer in between costs another deadline; from then on the back-off is at least
    one deadline and doubles.

    `sign_of_life` may be called from any thread. It only moves OPEN to HALF_OPEN.

    Args:
        fault_deadline_s: Longest time that a draft may owe an answer before `trip` is called.

    Attributes:
        state: The current state.
        faulty: True since the last fault, until an answer or a new connection.
        faults: Faults in a row, counted over all connections.
        fault_deadline_s: As given.
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
        """Record that a deadline passed without an answer."""
        self._misses += 1
        if self.state is BreakerState.HALF_OPEN:
            self._backoff_s = max(self._backoff_s, min(2 * self._backoff_s, LAST_SLOW_BACKOFF_S))
        elif self._misses < MISSES_TO_OPEN:
            return
        self._open(now)

    def trip(self, now: float) -> None:
        """Record a fault of the draft and open immediately."""
        self.faulty = True
        self.faults += 1
        if self.faults > 1:
            grown = max(2 * self._backoff_s, self.fault_deadline_s)
            self._backoff_s = min(grown, LAST_FAULTY_BACKOFF * self.fault_deadline_s)
        self._open(now)

    @property
    def refuses_all(self) -> bool:
        """True if even rows without a deadline must do without the draft."""
        return self.faulty and self.state is BreakerState.OPEN

    def _open(self, now: float) -> None:
        self._misses = 0
        self._closed_until = now + self._backoff_s
        self.state = BreakerState.OPEN

    def success(self) -> None:
        """Record an answer in time, and close."""
        self.reset()
        self.faults = 0
        self._backoff_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        """Close for a new connection, possibly to another draft. `faults` stays until an answer."""
        self._misses = 0
        self.faulty = False
        self.state = BreakerState.CLOSED

    def wants_probe(self, now: float) -> bool:
        """Return True if the draft should be pinged."""
        return self.state is BreakerState.OPEN and now >= self._closed_until

    def sign_of_life(self, now: float) -> None:
        """Record that the draft answered a ping."""
        if self.wants_probe(now):
            self.state = BreakerState.HALF_OPEN
