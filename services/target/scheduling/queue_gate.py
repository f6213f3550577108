"""Bounds the queue of waiting requests: beyond it, a new request is refused with a time to retry."""

from __future__ import annotations

import threading

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.shared.base.errors import OverloadedError

DEFAULT_RETRY_AFTER_S = 1.0
DRAIN_RATE_WEIGHT = 0.2


class QueueGate:
    """Counts requests that wait, before any work is done for them; the only part that other threads touch."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._requests = 0
        self._tokens = 0
        self._seconds_per_request: float | None = None
        self._last_leave = 0.0

    @property
    def requests(self) -> int:
        """Requests that wait now."""
        return self._requests

    def enter(self, prompt_tokens: int) -> None:
        """Count a request in.

        Raises:
            OverloadedError: The queue is full; says when to retry, from the measured drain rate.
        """
        with self._lock:
            if self._requests >= self._limits.max_queued:
                raise OverloadedError(
                    f"{self._requests} requests are waiting already, the limit of this server.",
                    retry_after_s=self._retry_after(),
                )
            if self._requests and self._tokens + prompt_tokens > self._limits.max_queued_tokens:
                raise OverloadedError(
                    f"{self._tokens} prompt tokens are waiting already; {prompt_tokens} more exceed the limit of "
                    f"{self._limits.max_queued_tokens}.",
                    retry_after_s=self._retry_after(),
                )
            self._requests += 1
            self._tokens += prompt_tokens

    def leave(self, prompt_tokens: int, now: float) -> None:
        """Count a request out: admitted, cancelled or failed."""
        with self._lock:
            self._requests -= 1
            self._tokens -= prompt_tokens
            if self._last_leave:
                gap = now - self._last_leave
                previous = self._seconds_per_request
                self._seconds_per_request = (
                    gap if previous is None else previous + DRAIN_RATE_WEIGHT * (gap - previous)
                )
            self._last_leave = now

    def _retry_after(self) -> float:
        if self._seconds_per_request is None:
            return DEFAULT_RETRY_AFTER_S
        return min(max(self._seconds_per_request * self._requests / 2, 0.1), 60.0)
