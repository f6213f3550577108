"""Limits the share of time that requests lose by waiting for trees that do not arrive.

A budget is a number of seconds. It grows as time passes, up to a capacity, except while it is paused because
no request could wait. It also grows by the time that trees have saved. Each wait that ends without trees is
subtracted from the budget. While the budget is used up, the target sends no requests to the draft. In any
period of length t without pauses, requests therefore lose at most

    capacity + share × t + one wait + the time that trees have saved

This bound also holds for a draft that, for example, is stopped for 0.9 s of every second. A draft that is
sometimes late remains in use if its trees save more time than its late answers cost.
"""

from __future__ import annotations


class WaitBudget:
    """A budget: the seconds that requests may still lose to waits that end without trees. Engine thread only.

    Args:
        share: Seconds that are added to the budget for each second that passes.
        capacity_s: The largest budget in seconds. The budget starts with this value.
    """

    def __init__(self, share: float, capacity_s: float) -> None:
        self._share = share
        self._capacity_s = capacity_s
        self._left_s = capacity_s
        self._at: float | None = None
        self._paused = False

    def pause(self, now: float) -> None:
        """Stop the growth, because no request can wait from now on."""
        self._grow(now)
        self._paused = True

    def resume(self, now: float) -> None:
        """Continue the growth after a pause."""
        self._grow(now)
        self._paused = False

    def spend(self, seconds: float, now: float) -> None:
        """Deduct a wait that ended without trees. `now` is the time of a monotonic clock."""
        self._grow(now)
        self._left_s -= seconds

    def earn(self, seconds: float, now: float) -> None:
        """Add time that trees have saved. `now` is the time of a monotonic clock."""
        self._grow(now)
        self._left_s = min(self._capacity_s, self._left_s + seconds)

    def empty_s(self, now: float) -> float:
        """Return the seconds until the budget is positive again; 0 if it is positive."""
        self._grow(now)
        return max(0.0, -self._left_s / self._share) if self._left_s <= 0 else 0.0

    def _grow(self, now: float) -> None:
        if self._at is not None and not self._paused:
            self._left_s = min(self._capacity_s, self._left_s + self._share * max(0.0, now - self._at))
        self._at = now
