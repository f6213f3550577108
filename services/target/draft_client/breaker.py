"""Circuit breaker for a draft that misses deadlines: stops requests to the draft, backs off, and retries."""

from __future__ import annotations

from enum import Enum

MISSES_TO_OPEN = 3
FIRST_BACKOFF_S = 0.1
LAST_SLOW_BACKOFF_S = 0.2
LAST_FAULTY_BACKOFF = 10.0
"""Longest back-off of a faulty draft, as a multiple of the fault deadline.

Because of this length, rows without a deadline lose less than a tenth of their time to a draft that only
answers pings.
"""


class BreakerState(Enum):
    """State of the circuit breaker for one draft.

    - CLOSED: the draft receives requests.
    - OPEN: the draft receives no requests.
    - HALF_OPEN: the draft has answered a ping, and a single sequence sends it a trial request.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Stops requests to a draft after three missed deadlines in a row, or immediately after a fault.

    After a back-off, an answered ping makes the breaker half-open. An answer in time closes the breaker.

    A draft that misses a deadline may only be too slow to be worth waiting for, so rows without a deadline
    still wait for this draft. These rows stop waiting only if the draft is `faulty`.

    The first fault may be a short pause of the draft, so the draft is tried again as soon as it answers a
    ping. Each further fault without an answer in between costs another fault deadline. From the second fault
    on, the back-off is therefore at least one fault deadline, and each further fault doubles the back-off.

    `sign_of_life` may be called from any thread, because it only changes OPEN to HALF_OPEN.

    Args:
        fault_deadline_s: Time in seconds after which an outstanding answer is a fault. The caller then calls
            `trip`.

    Attributes:
        state: The current state.
        faulty: True from a fault until the next answer or new connection.
        faults: Number of faults since the last answer, over all connections.
        fault_deadline_s: The constructor's argument.
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
        """Record a fault of the draft and open the breaker immediately."""
        self.faulty = True
        self.faults += 1
        if self.faults > 1:
            grown = max(2 * self._backoff_s, self.fault_deadline_s)
            self._backoff_s = min(grown, LAST_FAULTY_BACKOFF * self.fault_deadline_s)
        self._open(now)

    @property
    def refuses_all(self) -> bool:
        """True if even rows without a deadline must not wait for the draft."""
        return self.faulty and self.state is BreakerState.OPEN

    def _open(self, now: float) -> None:
        self._misses = 0
        self._closed_until = now + self._backoff_s
        self.state = BreakerState.OPEN

    def success(self) -> None:
        """Record an answer in time, and close the breaker."""
        self.reset()
        self.faults = 0
        self._backoff_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        """Close the breaker for a new connection, possibly to another draft. Keep `faults`."""
        self._misses = 0
        self.faulty = False
        self.state = BreakerState.CLOSED

    def wants_probe(self, now: float) -> bool:
        """Return True if the breaker is open, the back-off is over and the draft should be pinged."""
        return self.state is BreakerState.OPEN and now >= self._closed_until

    def sign_of_life(self, now: float) -> None:
        """Record that the draft answered a ping."""
        if self.wants_probe(now):
            self.state = BreakerState.HALF_OPEN
