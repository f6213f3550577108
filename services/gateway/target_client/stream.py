"""One sequence in a target's session: delivers events in order, and pauses the sequence for slow readers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from outrider.services.gateway.request import TargetDelta, TargetFinish
from outrider.shared.base.errors import ErrorCode, OutriderError
from outrider.target.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Limits on a sequence's unread events: those that the target has sent and the reply has not used yet.

    Attributes:
        max_unread_bytes: Size of the unread events, in bytes, above which the sequence is paused. When the
            size falls below a quarter of this limit, the sequence is resumed.
        timeout_s: Seconds without a read after which a paused sequence is aborted.
    """

    max_unread_bytes: int
    timeout_s: float


class SessionOutlet(Protocol):
    """Sends messages of a stream to the target."""

    def send(self, message: target_pb2.SessionRequest) -> None:
        """Queue a message to the target."""
        ...

    def forget(self, request_id: str) -> None:
        """Stop delivering events of this sequence."""
        ...


class TargetStream:
    """The events of one sequence. Read with `next` until a `TargetFinish`, and always call `close`.

    Only one task may call `next`.
    """

    def __init__(self, request_id: str, session: SessionOutlet, limits: ReaderLimits) -> None:
        self.request_id = request_id
        self._session = session
        self._limits = limits
        self._events: deque[tuple[TargetDelta | TargetFinish | OutriderError, int]] = deque()
        self._unread_bytes = 0
        self._ended = False
        self._loop = asyncio.get_running_loop()
        # The future on which `next` waits.
        self._arrival: asyncio.Future[None] | None = None
        self._last_read = self._loop.time()
        self._abort_timer: asyncio.TimerHandle | None = None

    async def next(self) -> TargetDelta | TargetFinish:
        """Wait for the next event.

        Raises:
            OutriderError: If the target rejected or lost the sequence, or if the connection was lost.
        """
        while not self._events:
            self._arrival = self._loop.create_future()
            await self._arrival
        event, cost = self._events.popleft()
        self._unread_bytes -= cost
        self._last_read = self._loop.time()
        if self._abort_timer and self._unread_bytes < self._limits.max_unread_bytes // 4 and not self._ended:
            self._abort_timer.cancel()
            self._abort_timer = None
            self._session.send(
                target_pb2.SessionRequest(resume=target_pb2.Resume(request_id=self.request_id))
            )
        if isinstance(event, OutriderError):
            raise event
        return event

    def cancel(self, keep_tokens: int | None = None) -> None:
        """Ask the target to stop the sequence. Its `TargetFinish` still arrives.

        Args:
            keep_tokens: Number of tokens to bill. None bills all tokens.
        """
        if not self._ended:
            cancel = target_pb2.Cancel(request_id=self.request_id, keep_tokens=keep_tokens)
            self._session.send(target_pb2.SessionRequest(cancel=cancel))

    def close(self) -> None:
        """Release the stream. Cancel the sequence if it still runs. Repeated calls have no effect."""
        self.cancel()
        self._ended = True
        self._session.forget(self.request_id)
        if self._abort_timer:
            self._abort_timer.cancel()
            self._abort_timer = None

    def deliver(self, event: TargetDelta | TargetFinish | OutriderError, cost: int) -> None:
        """Add an event that the session with the target has received for this sequence.

        Args:
            event: The event. Any event other than a `TargetDelta` ends the stream.
            cost: Memory that the event takes until the event is read, in bytes.
        """
        if self._ended:
            return
        self._ended = not isinstance(event, TargetDelta)
        self._events.append((event, cost))
        self._unread_bytes += cost
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if self._unread_bytes > self._limits.max_unread_bytes and not self._abort_timer and not self._ended:
            self._session.send(target_pb2.SessionRequest(pause=target_pb2.Pause(request_id=self.request_id)))
            self._last_read = self._loop.time()
            self._abort_timer = self._loop.call_later(self._limits.timeout_s, self._abort_slow_reader)

    def _abort_slow_reader(self) -> None:
        give_up_at = self._last_read + self._limits.timeout_s
        if give_up_at > self._loop.time():
            # The client reads slowly, but it has read an event within the time limit.
            self._abort_timer = self._loop.call_at(give_up_at, self._abort_slow_reader)
            return
        self._abort_timer = None
        message = f"The client did not read its stream for {self._limits.timeout_s:g} s, so it was aborted."
        self.cancel()
        # Drop the buffered events, because the client would not read them in time either.
        self._events.clear()
        self._ended = False
        self.deliver(OutriderError(message, code=ErrorCode.CANCELLED, reason="slow_reader"), 0)
