"""Bidirectional streams that a message passes with as few threads as gRPC's core allows.

In grpcio's own streams a message is handed from thread to thread three times on either side, and each of them must first get the
interpreter. Here whoever sends starts the core's operation itself, and the thread that hears of an arrival runs the receiver:

    client   sender → core           server   core → the server's polling thread, which calls `on_message`
             core → the thread in `receive`   any sender → core

The server's side is in `shared.rpc.direct_server`. Both use the layer below grpcio's public interface (`grpc._cython.cygrpc`), as grpcio's
own calls do; on the wire nothing differs.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, cast

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the library has no types for it

from outrider.shared.rpc.polling import PollWindow

NO_FLAGS = 0
WATCH_S, LONGEST_WATCH_S = 0.005, 0.05
"""How often it is looked whether the stream is free again: less often where waits may be long, as that takes the interpreter from who is
at work. The end of a wait is looked at in time whatever it is."""
KEEP_S = 0.05
"""How long a thread that has read for itself keeps the stream, in case that it reads again."""
STATUS_OF_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


class StreamEndedError(grpc.RpcError):
    """A stream ended with a status other than OK; has what `grpc.Call` tells of it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[Any, ...]) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        """See `grpc.Call.code`."""
        return self._code

    def details(self) -> str:
        """See `grpc.Call.details`."""
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """See `grpc.RpcContext.trailing_metadata`."""
        return self._metadata


class _Tag(Enum):
    HEADERS = auto()
    STATUS = auto()
    SENT = auto()
    RECEIVED = auto()
    LOOK = auto()
    PEEKED = auto()


class ClientStream:
    """A call of a bidirectional method, which starts at once.

    `send` and `cancel` may be called from any thread. One thread, which stays, is in `receive`; another one may be in `receive_within`.
    Whoever is in `receive_within` reads from the stream itself; the thread in `receive` makes way, and takes care of the time.

    Args:
        channel: Made by `connect`.
        method: ``/package.Service/Method``.
        vigil: When to poll.
    """

    def __init__(self, channel: grpc.Channel, method: str, vigil: PollWindow) -> None:
        self._vigil = vigil
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._sending = False
        # Whether the core was asked for the next message, which can wait until the last one is dealt with.
        self._listening = True
        self._status: Any = None
        self._reading = threading.Lock()
        self._taken = False
        # Told when the thread that watches over a wait is to look sooner than it meant to, and until when it sleeps.
        self._sooner = threading.Condition(self._lock)
        self._asleep_until = 0.0
        self._taken_at = 0.0
        self._deadline = math.inf
        # How long the last `receive_within` was to wait at most.
        self._patience = 0.0
        # Messages that the thread in `receive` has dealt with, as of now and as of the last `receive_within`.
        self._dealt = 0
        self._dealt_known = 0
        self._dealing = False
        # Messages that came while something else was looked for.
        self._early: deque[bytes] = deque()
        starts = (
            (
                (
                    cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
                    cygrpc.ReceiveStatusOnClientOperation(NO_FLAGS),
                ),
                _Tag.STATUS,
            ),
            ((cygrpc.ReceiveInitialMetadataOperation(NO_FLAGS),), _Tag.HEADERS),
            ((cygrpc.ReceiveMessageOperation(NO_FLAGS),), _Tag.RECEIVED),
        )
        # How many operations the core still owes an event: the call's queue is gone with the last one.
        self._due = len(starts)
        core = cast(Any, channel)._channel
        self._call: Any = core.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            method.encode(),
            None,
            None,
            None,
            None,
            starts,
        )

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return not self._due

    @property
    def taken(self) -> bool:
        """Whether the thread in `receive` makes way for the one of `receive_within`, for some time after its last call."""
        return self._taken

    def send(self, message: bytes) -> None:
        """Send a message, or queue it behind one that is being sent; never waits. What a stream that has ended is given is dropped."""
        with self._lock:
            if not self._sending:
                self._sending = self._operate((cygrpc.SendMessageOperation(message, NO_FLAGS),), _Tag.SENT)
                return
            self._unsent.append(message)
        self.look()  # perhaps nobody reads now, and so nobody hears that the one before is on its way

    def receive(self) -> bytes | None:
        """Wait for the next message that no other thread takes; None when the stream ended with status OK.

        Who calls it again has dealt with the last one.

        Raises:
            StreamEndedError: It ended otherwise.
        """
        if self._dealing:
            with self._lock:
                self._dealing = False
                self._dealt += 1
                if self._taken:
                    self._operate((), _Tag.LOOK)
        while True:
            # The other thread may take the stream at any moment; who holds the lock for long is it, and is to be watched over.
            if self._taken or not self._reading.acquire(timeout=WATCH_S):
                self._watch()
                continue
            try:
                message = None if self._taken else self._read(lambda: self._taken)
            finally:
                self._reading.release()
            if message is not None:
                self._dealing = True
                return message
            if self.ended and not self._taken:
                break
        code = STATUS_OF_NUMBER.get(self._status.code(), grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            return None
        raise StreamEndedError(
            code, self._status.details() or "", tuple(self._status.trailing_metadata() or ())
        )

    def receive_within(self, seconds: float) -> bytes | None:
        """Wait for the next message; None when none came in time, when the thread in `receive` has dealt with one in between, or when the
        stream has ended, which `receive` tells."""
        deadline = time.monotonic() + seconds
        with self._lock:
            first, self._taken = not self._taken, True
            self._deadline, self._patience = deadline, seconds
            if deadline < self._asleep_until:
                self._sooner.notify()
            if first:
                self._operate((), _Tag.LOOK)
            message = self._early.popleft() if self._early else None
        if message is None and not self._dealt_with_others():
            with self._reading:
                message = self._read(lambda: self._dealt_with_others() or time.monotonic() >= deadline)
        with self._lock:
            self._deadline, self._taken_at = math.inf, time.monotonic()
        return message

    def give_back(self) -> None:
        """Let the thread in `receive` read again, now; for the thread of `receive_within`, which expects nothing soon."""
        with self._lock:
            self._taken = False
            self._sooner.notify()

    def poll(self) -> list[bytes]:
        """Return what has come, without waiting; nothing while the thread in `receive` reads. For the thread of `receive_within`."""
        if not self._taken:
            return []
        self.look()
        with self._lock:
            messages = list(self._early)
            self._early.clear()
        return messages

    def look(self) -> None:
        """Take in what the core has finished, without waiting, unless somebody reads, who does. Any thread.

        What was sent makes way for what is to be sent then, an end shows in `ended`, and messages are returned to whoever asks next.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._listen()
                peeking, told = self._operate((), _Tag.PEEKED), False
            while peeking and self._due:
                event = self._call.next_event()
                with self._lock:
                    message = self._handle(event)
                    if message is not None:
                        self._early.append(message)
                        self._listen()
                peeking, told = event.tag is not _Tag.PEEKED, told or event.tag is _Tag.LOOK
            if told:  # somebody else was meant
                with self._lock:
                    self._operate((), _Tag.LOOK)
        finally:
            self._reading.release()

    def _dealt_with_others(self) -> bool:
        with self._lock:
            before, self._dealt_known = self._dealt_known, self._dealt
            return before != self._dealt_known

    def cancel(self) -> None:
        """End the stream, more than once if need be."""
        self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "Locally cancelled by application!")

    def drain(self) -> None:
        """Take what is left of a cancelled stream, so that the core can free it; on the thread of `receive`."""
        with contextlib.suppress(StreamEndedError):
            while self.receive() is not None:
                pass

    def _watch(self) -> None:
        """While another thread reads: end its wait in time, and take over when it has read for the last time."""
        with self._lock:
            if self._taken:  # otherwise it was given back just now
                now = time.monotonic()
                self._asleep_until = self._next_look(now)
                self._sooner.wait(self._asleep_until - now)
                self._asleep_until = 0.0
            now = time.monotonic()
            if now >= self._deadline:
                self._operate((), _Tag.LOOK)
            elif self._deadline == math.inf and now - self._taken_at > KEEP_S:
                self._taken = False
        if self._unsent:
            self.look()

    def _next_look(self, now: float) -> float:
        """Return until when the watch sleeps: no longer than the present wait. Who was told that it is over gets a moment to hear it."""
        if self._deadline <= now:
            return now + WATCH_S
        return min(self._deadline, now + min(max(WATCH_S, self._patience), LONGEST_WATCH_S))

    def _read(self, enough: Callable[[], bool]) -> bytes | None:
        """Return the next message; None at the end of the stream, or when it is told to look and finds that it is `enough`."""
        while True:
            with self._lock:
                if self._early:
                    return self._early.popleft()
                if not self._due:
                    return None
                self._listen()
            self._vigil.begin()
            event = self._call.next_event()
            with self._lock:
                message = self._handle(event)
            if message is not None:
                return message
            if event.tag is _Tag.LOOK and enough():
                return None

    def _handle(self, event: Any) -> bytes | None:
        """Take an event; return the message of an arrival. Called with the lock."""
        self._due -= 1
        if event.tag is _Tag.RECEIVED:
            message: bytes | None = event.batch_operations[0].message()
            self._listening = message is None  # nothing comes behind the end
            return message
        if event.tag is _Tag.SENT:
            self._sending = bool(
                event.success
                and self._unsent
                and self._operate((cygrpc.SendMessageOperation(self._unsent.popleft(), NO_FLAGS),), _Tag.SENT)
            )
        elif event.tag is _Tag.STATUS:
            self._status = event.batch_operations[1]
        return None

    def _listen(self) -> None:
        """Ask for the next message. Called with the lock."""
        if not self._listening:
            self._listening = True
            self._operate((cygrpc.ReceiveMessageOperation(NO_FLAGS),), _Tag.RECEIVED)

    def _operate(self, operations: tuple[Any, ...], tag: _Tag) -> bool:
        """Start operations, without any merely have the reader look up; False when the call has ended. Called with the lock."""
        started = bool(self._call.operate(operations, tag))
        self._due += started
        return started
