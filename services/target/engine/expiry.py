"""Finds requests whose deadline has passed or that were paused too long, and the time of the next check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import DeadlineExceededError, ErrorCode, OutriderError


class Expiry:
    """Tracks the earliest time at which a live request may have to end. Engine thread only.

    Attributes:
        next_due: Time of the next check for expired requests, from `time.monotonic()`. No request expires
            before this time. None if no live request can expire.
    """

    def __init__(self) -> None:
        self.next_due: float | None = None

    def due_at(self, moment: float | None) -> None:
        """Schedule a check at `moment` or earlier. With None, do nothing."""
        if moment is not None and (self.next_due is None or moment < self.next_due):
            self.next_due = moment

    def clear(self) -> None:
        """Cancel the next check. Call when no request is live."""
        self.next_due = None

    def overdue(
        self, live: Iterable[Sequence], now: float, pause_timeout_s: float
    ) -> Iterator[tuple[Sequence, OutriderError]]:
        """Yield each request that must end now, with its error. Update `next_due` for the other requests."""
        if self.next_due is None or now < self.next_due:
            return
        self.next_due = None
        for sequence in list(live):
            deadline, paused_at = sequence.request.deadline, sequence.paused_at
            if deadline is not None and now >= deadline:
                yield sequence, DeadlineExceededError("The deadline passed before the answer was complete.")
            elif paused_at is not None and now >= paused_at + pause_timeout_s:
                message = (
                    f"The client read too slowly: the request was paused for over {pause_timeout_s:.0f} s."
                )
                yield sequence, OutriderError(message, code=ErrorCode.CANCELLED, reason="slow_reader")
            else:
                self.due_at(deadline)
                self.due_at(None if paused_at is None else paused_at + pause_timeout_s)
