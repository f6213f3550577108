"""Limits the queue of a model while requests keep arriving faster than the model's targets answer them.

A long queue has one of three causes:

- A client has sent many requests at once. The queue becomes short by itself.
- Many clients each wait for an answer before they send the next request. The queue stays as long as it is.
- Requests arrive faster than they are answered. Each request then waits longer than the one before it.

Only the last cause needs a limit. Once a queue has been long for some time, `QueueGrowth` therefore limits
the number of requests. With R running sequences, a queue has one of three states:

    queue     when                                            limit of the number of requests
    short     at most `SHORT_SHARE` · R sequences wait        none
    long      more sequences wait                             none
    growing   since the queue became long, `ENDED_SHARE` · R  1 + `SPARE_SHARE` times the largest number
              sequences have ended, and no burst arrives      since the queue became long

The limit counts requests and not sequences, because clients that wait for their answers keep the number of
requests constant, even if some of them want several answers. The limit is a little higher than the largest
number, because a client that cancels a request may send the next one before the gateway has noticed.

A *burst* is a time of at most `BURST_S` in which at least `BURST_RATE` sequences arrive for each sequence
that ends.
"""

from __future__ import annotations

from collections.abc import Callable

SHORT_SHARE, SHORT = 1 / 3, 4
"""A queue is short if at most this share of the number of running sequences wait, or at most this many."""
ENDED_SHARE, ENDED = 0.25, 4
"""A long queue is growing once this share of the number of running sequences, and this many, have ended."""
BURST_RATE, BURST_S = 4.0, 2.0
SPARE_SHARE, SPARE = 0.05, 2
"""A growing queue may exceed its largest number of requests by this share, and by at least this many."""
REST_S = 1.0
"""Time in seconds for which a queue must be short before its limit ends."""


class QueueGrowth:
    """The requests of one model at a gateway, and the limit of their number. For the event loop only.

    Args:
        clock: Function that returns the time in seconds.

    Attributes:
        waiting: Number of sequences without a first token.
        active: Number of all sequences.
        requests: Number of all requests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waiting = 0
        self.active = 0
        self.requests = 0
        self._clock = clock
        # Since when the queue has been long, and how many sequences have arrived and ended since then.
        self._long_since: float | None = None
        self._arrived = 0
        self._ended = 0
        self._most_requests = 0
        self._short_since: float | None = None

    @property
    def short_len(self) -> int:
        """The largest number of waiting sequences of a short queue."""
        return max(SHORT, int(SHORT_SHARE * (self.active - self.waiting)))

    @property
    def growing(self) -> bool:
        """Whether the queue is in the state *growing*."""
        if self._long_since is None or self._ended < max(ENDED, ENDED_SHARE * (self.active - self.waiting)):
            return False
        return self._arrived < BURST_RATE * self._ended or self._clock() - self._long_since >= BURST_S

    @property
    def full(self) -> bool:
        """Whether a further request would exceed the limit of a growing queue."""
        most = self._most_requests + max(SPARE, int(SPARE_SHARE * self._most_requests))
        return self.requests >= most and self.waiting > self.short_len and self.growing

    def enter(self, sequences: int) -> None:
        """Count a new request, whose sequences wait."""
        self.requests += 1
        self.waiting += sequences
        self.active += sequences
        self._arrived += sequences
        self._observe()

    def start(self) -> None:
        """Record that a sequence has left the queue: its first token has arrived, or it has ended."""
        self.waiting -= 1
        self._observe()

    def end(self, sequences: int, waiting: int) -> None:
        """Record that the sequences of a request have ended. `waiting` of them never left the queue."""
        self.requests -= 1
        self.waiting -= waiting
        self.active -= sequences
        self._ended += sequences - waiting
        self._observe()

    def _observe(self) -> None:
        now = self._clock()
        if self._short_since is not None and now - self._short_since >= REST_S:
            self._long_since = self._short_since = None
        if self.waiting > self.short_len:
            self._short_since = None
            if self._long_since is None:
                self._long_since, self._arrived, self._ended, self._most_requests = now, 0, 0, self.requests
            elif not self.growing:
                self._most_requests = max(self._most_requests, self.requests)
        elif self._long_since is not None and self._short_since is None:
            self._short_since = now
