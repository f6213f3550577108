"""Limits per minute, as token buckets: a full bucket holds the amount of one minute and refills steadily."""

from __future__ import annotations

from collections.abc import Callable

MINUTE_S = 60.0
ROUNDING = 1e-6


class MinuteBucket:
    """A token bucket: the amount that an API key may still use under a limit per minute.

    The amount grows by `limit` per minute, and never above `limit`. It may fall below zero, because the
    number of generated tokens is known only after their generation. Such a debt delays later requests, so the
    limit holds on average.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    @property
    def level(self) -> float:
        """Amount that may be used now. Negative after a debt."""
        now = self._clock()
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    def resize(self, limit: int) -> None:
        """Change the limit. The amount that has been used stays the same."""
        used = self.limit - self.level
        self.limit = limit
        self._level = limit - used

    def take(self, amount: float) -> None:
        """Use an amount, whether or not it is available."""
        self._level = self.level - amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available; 0 if it is available now.

        If `amount` exceeds the limit, the wait ends when the bucket is full. Without this rule, a long prompt
        could never run.
        """
        missing = min(amount, float(self.limit)) - self.level
        # A rounding error must not refuse a request that arrives exactly when the amount is available.
        return missing * MINUTE_S / self.limit if missing > ROUNDING else 0.0
