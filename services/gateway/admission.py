"""Bounded queues: what may wait for the target, in sequences and in prompt tokens. Beyond that the answer is an immediate 429."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

from outrider.shared.base.errors import OverloadedError

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
# Weight of the newest interval between two requests that left the queue.
DRAIN_ALPHA = 0.2


class Admission:
    """Counts waiting sequences. A sequence waits from admission to its first token. Used on the event loop only."""

    def __init__(self, max_requests: int, max_prompt_tokens: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = clock
        self._drain_interval_s: float | None = None
        self._last_departure: float | None = None
        self.waiting = 0
        self.waiting_tokens = 0
        self.active = 0

    def admit(self, sequences: int) -> Slot:
        """Reserve room for `sequences`; use the slot as a context manager around the whole request.

        Raises:
            OverloadedError: the queue is full.
        """
        if self.waiting and self.waiting + sequences > self._max_requests:
            raise self._overloaded(f"{self.waiting} sequences wait already (limit {self._max_requests})")
        return Slot(self, sequences)

    def _overloaded(self, why: str) -> OverloadedError:
        return OverloadedError(
            f"The server is overloaded: {why}. Retry later.", retry_after_s=self.retry_after_s()
        )

    def retry_after_s(self) -> float:
        """Return when to come back: the time in which half of the queue drains at the measured rate, in whole seconds."""
        expected = (self._drain_interval_s or MIN_RETRY_S) * max(1, self.waiting) / 2
        return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(expected))))

    def _enter_tokens(self, tokens: int) -> None:
        # One prompt that alone exceeds the limit is let in when nothing else waits: it could never run otherwise.
        if self.waiting_tokens and self.waiting_tokens + tokens > self._max_prompt_tokens:
            raise self._overloaded(
                f"{self.waiting_tokens} prompt tokens wait already (limit {self._max_prompt_tokens})"
            )
        self.waiting_tokens += tokens

    def _leave(self, sequences: int, tokens: int, served: bool) -> None:
        self.waiting -= sequences
        self.waiting_tokens -= tokens
        if not served:
            return
        now = self._clock()
        if self._last_departure is not None:
            interval = now - self._last_departure
            previous = self._drain_interval_s
            self._drain_interval_s = (
                interval if previous is None else previous + DRAIN_ALPHA * (interval - previous)
            )
        # Only intervals between departures from one queue tell how fast it drains.
        self._last_departure = now if self.waiting else None


class Slot:
    """The room of one request with one or more sequences; leaving the context gives back whatever is still held."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self._admission = admission
        self._sequences = sequences
        self._tokens: dict[int, int] = {}
        self._waiting = sequences
        admission.waiting += sequences
        admission.active += sequences

    def add_prompts(self, lengths: list[int]) -> None:
        """Count the prompts, one length per sequence, once they are known.

        Raises:
            OverloadedError: too many prompt tokens wait.
        """
        self._admission._enter_tokens(sum(lengths))
        self._tokens = dict(enumerate(lengths))

    def started(self, index: int) -> None:
        """Sequence `index` has left the queue: its first token came, or it ended."""
        tokens = self._tokens.pop(index, None)
        if tokens is not None:
            self._waiting -= 1
            self._admission._leave(1, tokens, served=True)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission._leave(self._waiting, sum(self._tokens.values()), served=False)
        self._admission.active -= self._sequences
        self._tokens.clear()
        self._waiting = 0
