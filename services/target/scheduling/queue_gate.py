"""Limits the queue of waiting requests. A refusal names the time after which to retry."""

from __future__ import annotations

import threading
from collections import Counter

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.shared.base.errors import OverloadedError
from outrider.shared.base.queue_share import exceeds_share

DEFAULT_RETRY_AFTER_S = 1.0
DRAIN_RATE_WEIGHT = 0.2


class QueueGate:
    """Counts waiting requests and their prompt tokens, and refuses requests above the limits. Thread-safe."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._requests = 0
        self._tokens = 0
        # Waiting requests and their prompt tokens, by tenant. Entries of 0 are removed.
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()
        self._seconds_per_request: float | None = None
        self._last_leave = 0.0

    @property
    def requests(self) -> int:
        """Number of waiting requests."""
        return self._requests

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of the waiting requests."""
        return self._tokens

    def enter(self, prompt_tokens: int, tenant: str = "", *, resumed: bool = False) -> None:
        """Count a request that enters the queue, or refuse it if the queue is full.

        Requests without a tenant may fill the whole queue. A tenant must leave room for other tenants.

        Args:
            prompt_tokens: Number of prompt tokens.
            tenant: Name of the tenant. Empty for a request without a tenant.
            resumed: True if another target has begun the answer. Such a request is accepted even if the queue
                is full.

        Raises:
            OverloadedError: The queue, or this tenant's part of the queue, is full. The error contains the
                time after which to retry. This time is computed from the measured rate at which the queue
                drains.
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
            if tenant:
                if not resumed:
                    self._check_share(prompt_tokens, tenant)
                self._requests_of[tenant] += 1
                self._tokens_of[tenant] += prompt_tokens
            self._requests += 1
            self._tokens += prompt_tokens

    def _check_share(self, prompt_tokens: int, tenant: str) -> None:
        held, tokens = self._requests_of[tenant], self._tokens_of[tenant]
        limits = self._limits
        if exceeds_share(held + 1, self._requests, limits.max_queued) or (
            held and exceeds_share(tokens + prompt_tokens, self._tokens, limits.max_queued_tokens)
        ):
            raise OverloadedError(
                f"{held} requests with {tokens} prompt tokens of this tenant are already waiting, which is "
                "its share of the queue.",
                retry_after_s=self._retry_after(),
            )

    def leave(self, prompt_tokens: int, now: float, tenant: str = "") -> None:
        """Stop counting a request that was admitted, was cancelled or has failed."""
        with self._lock:
            self._requests -= 1
            self._tokens -= prompt_tokens
            if tenant:
                self._requests_of[tenant] -= 1
                self._tokens_of[tenant] -= prompt_tokens
                if not self._requests_of[tenant]:
                    del self._requests_of[tenant], self._tokens_of[tenant]
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
