"""Limits the queue of waiting requests. A refusal names the time after which to retry."""

from __future__ import annotations

import threading

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.shared.base.errors import OverloadedError

DEFAULT_RETRY_AFTER_S = 1.0
DRAIN_RATE_WEIGHT = 0.2


class QueueGate:
    """Counts waiting requests and their prompt tokens, and refuses requests above the limits. Thread-safe."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._requests = 0
        self._tokens = 0
        self._seconds_per_request: float | None = None
        self._last_leave = 0.0

    @property
    def requests(self) -> int:
        """Number of waiting requests."""
        return self._requests

    def enter(self, prompt_tokens: int, *, resumed: bool = False) -> None:
        """Count a request that starts to wait.

        Args:
            prompt_tokens: Number of prompt tokens.
            resumed: True if another target has begun the answer. Such a request is accepted by a full queue.

        Raises:
            OverloadedError: The queue is full. The time after which to retry is computed from the measured
                rate at which the queue drains.
        """
        with self._lock:
            if self._requests >= self._limits.max_queued and not resumed:
                raise OverloadedError(
                    f"{self._requests} requests are already waiting, the limit of this server.",
                    retry_after_s=self._retry_after(),
                )
            # An empty queue accepts a prompt of any length. Otherwise a very long prompt could never be
            # served.
            over = self._tokens + prompt_tokens > self._limits.max_queued_tokens
            if self._requests and over and not resumed:
                raise OverloadedError(
                    f"{self._tokens} prompt tokens are already waiting; {prompt_tokens} more exceed the "
                    f"limit of {self._limits.max_queued_tokens}.",
                    retry_after_s=self._retry_after(),
                )
            self._requests += 1
            self._tokens += prompt_tokens

    def leave(self, prompt_tokens: int, now: float) -> None:
        """Stop counting a request that was admitted, was cancelled or has failed."""
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
