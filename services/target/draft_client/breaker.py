"""Circuit breaker for a draft that misses deadlines: stops requests to the draft, backs off, and retries."""

from __future__ import annotations

from enum import Enum

from outrider.services.target.draft_client.wait_budget import WaitBudget

MISSES_TO_OPEN = 3
FIRST_BACKOFF_S = 0.1
LAST_SLOW_BACKOFF_S = 0.2
LAST_FAULTY_BACKOFF = 10.0
"""Longest back-off of a faulty draft, as a multiple of the fault deadline.

A faulty draft may still answer pings. Rows without a deadline then wait for it once more after each back-off.
With this longest back-off, these waits take less than a tenth of the rows' time.
"""
SHARE, CAPACITY_S = 0.015, 0.1
"""Limits of the time that waits for open sessions may cost rows with a deadline and rows without drafts.

`SHARE` is the share of time that these rows may lose. `CAPACITY_S` is the largest budget that these rows can
accumulate, in seconds.
"""
OPENING_SHARE, OPENING_CAPACITY_S = 0.005, 0.05
"""The same limits for waits for sessions that the draft has not opened yet."""
PATIENT_SHARE = 0.1
"""Share of the time that rows without a deadline may lose."""
PATIENT_CAPACITY = 0.25
"""Largest budget that rows without a deadline can accumulate, as a multiple of the fault deadline. A single
fault never costs more than this budget."""


class BreakerState(Enum):
    """State of the circuit breaker for one draft service.

    - CLOSED: the target sends requests to the draft.
    - OPEN: the target sends no requests to the draft.
    - HALF_OPEN: the draft has answered a ping. As a trial, one sequence per round may request a tree.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Circuit breaker: stops requests to a draft after three missed deadlines in a row, or after one fault.

    The breaker then stays open for a back-off time. Afterwards, an answered ping makes it half-open. The next
    tree that arrives in time closes it.

    A draft that misses deadlines may only be slow. Sequences without a deadline (speculation mode `on`)
    therefore keep requesting trees, unless the draft is `faulty`.

    After a first fault, the draft is tried again as soon as it answers a ping. After a second fault in a row,
    the back-off is at least one fault deadline. Each further fault in a row doubles the back-off.

    A draft that repeatedly stops and recovers never has two faults in a row. Three budgets of lost time
    (`WaitBudget`) therefore limit the waits:

    - The first budget is for sequences with a deadline and sequences that need no tree. After a miss, the
      back-off lasts until this budget is positive again.
    - The second budget is for sequences without a deadline. After a fault, the back-off lasts until this
      budget is positive again.
    - The third budget is for the first trees of new sessions. It never opens the breaker, because a first
      tree may take long.

    Any thread may call `sign_of_life`. This method only changes OPEN to HALF_OPEN.

    Args:
        fault_deadline_s: Seconds after which an outstanding answer is a fault. The caller then calls `trip`.

    Attributes:
        state: The current state.
        faulty: True from a fault until the draft's next answer or the next connection.
        faults: Number of faults since the last answer, over all connections.
        fault_deadline_s: The constructor's argument.
        budget: The first budget, in seconds. Only waits for sessions that the draft has opened use it.
        opening_budget: The third budget, in seconds. Waits for sessions that the draft has not opened yet use
            it.
    """

    def __init__(self, fault_deadline_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.faulty = False
        self.faults = 0
        self.fault_deadline_s = fault_deadline_s
        self.budget = WaitBudget(SHARE, CAPACITY_S)
        self.opening_budget = WaitBudget(OPENING_SHARE, OPENING_CAPACITY_S)
        self._patient_capacity_s = PATIENT_CAPACITY * fault_deadline_s
        self._patient_budget = WaitBudget(PATIENT_SHARE, self._patient_capacity_s)
        self._misses = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._closed_until = 0.0

    def pause(self, now: float) -> None:
        """Stop the growth of the first and the third budget, because no session is open any more.

        Otherwise, requests after each calm time would lose full budgets to a draft that keeps stopping.
        """
        self.budget.pause(now)
        self.opening_budget.pause(now)

    def resume(self, now: float) -> None:
        """Let these budgets grow again, because a session is open."""
        self.budget.resume(now)
        self.opening_budget.resume(now)

    def miss(self, now: float) -> None:
        """Record that a deadline passed without an answer. The caller has deducted the wait from `budget`."""
        self._misses += 1
        empty_s = self.budget.empty_s(now)
        if self.state is BreakerState.HALF_OPEN:
            self._backoff_s = max(self._backoff_s, min(2 * self._backoff_s, LAST_SLOW_BACKOFF_S))
        elif self._misses < MISSES_TO_OPEN and not empty_s:
            return
        self._open(now, max(self._backoff_s, empty_s))

    def trip(self, now: float, waited_s: float = 0.0) -> None:
        """Record a fault of the draft, and open the circuit breaker immediately.

        Args:
            now: Current time of a monotonic clock, in seconds.
            waited_s: Seconds that sequences without a deadline have waited for trees that did not arrive.
        """
        self.faulty = True
        self.faults += 1
        if self.faults > 1:
            grown = max(2 * self._backoff_s, self.fault_deadline_s)
            self._backoff_s = min(grown, LAST_FAULTY_BACKOFF * self.fault_deadline_s)
        self._patient_budget.spend(min(waited_s, self._patient_capacity_s), now)
        self._open(now, max(self._backoff_s, self._patient_budget.empty_s(now)))

    @property
    def refuses_all(self) -> bool:
        """True if even rows without a deadline must not wait for the draft."""
        return self.faulty and self.state is BreakerState.OPEN

    def refuses(self, *, must_wait: bool, is_first: bool) -> str:
        """Return the fallback reason if a sequence may not request a tree now, or an empty string if it may.

        Args:
            must_wait: True if the sequence has no deadline (speculation mode `on`).
            is_first: True if no other sequence of the round has requested a tree.
        """
        if self.state is BreakerState.HALF_OPEN and not is_first:
            return "half_open"
        return "late" if self.state is BreakerState.OPEN and not must_wait else ""

    def _open(self, now: float, backoff_s: float) -> None:
        self._misses = 0
        self._closed_until = now + backoff_s
        self.state = BreakerState.OPEN

    def success(self, now: float) -> None:
        """Record that a tree arrived in time. Close the circuit breaker, except during a back-off.

        Trees can arrive during a back-off, because sequences without a deadline still wait for a slow draft.
        """
        self._misses = 0
        self.faults = 0
        if self.state is BreakerState.OPEN and now < self._closed_until:
            return
        self.state = BreakerState.CLOSED
        self.faulty = False
        self._backoff_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        """Close the breaker for a new connection, possibly to another draft. Keep `faults` and budgets."""
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
