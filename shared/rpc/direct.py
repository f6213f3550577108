"""Client side of low-latency bidirectional gRPC streams, with fewer thread switches than grpcio's streams.

In grpcio's own streams, each side passes a message between threads three times, and each thread must first
get the GIL. Here, the sending thread itself starts the send operation in gRPC's C core ("core" below). The
thread that receives the core's completion event handles the message:

    client to server   sending thread → core ~~~ core → server's polling thread, which calls `on_message`
    server to client   sending thread → core ~~~ core → client's thread in `receive`

`shared.rpc.direct_server` contains the server side. Like grpcio's own calls, both sides use the layer below
grpcio's public interface (`grpc._cython.cygrpc`). The bytes on the network are the same as with grpcio.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the library has no types for it

from outrider.shared.rpc.peer_token import inner_channel
from outrider.shared.rpc.polling import PollWindow

NO_FLAGS = 0
WATCH_S, LONGEST_WATCH_S = 0.005, 0.05
"""Shortest and longest interval at which the reader checks whether the borrower has returned the stream.

`ClientStream` explains the reader and the borrower. During longer waits the intervals are longer, because
each check takes the GIL from working threads. The deadline of a wait is always checked on time.
"""
KEEP_S = 0.05
"""How long a borrower keeps a `ClientStream` after `receive_within`, because it may call the method again.
"""
STATUS_OF_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


class StreamEndedError(grpc.RpcError):
    """A stream ended with a status other than OK. The error has the methods of the failed `grpc.Call`."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[Any, ...]) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        """Return the gRPC status code."""
        return self._code

    def details(self) -> str:
        """Return the status message."""
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Return the trailing metadata as (key, value) pairs."""
        return self._metadata


class _Tag(Enum):
    """Kinds of events in the queue of a call."""

    HEADERS = auto()  # the initial metadata arrived
    STATUS = auto()  # the call has ended
    SENT = auto()  # a message is on its way
    RECEIVED = auto()  # a message arrived, or the end of the stream
    LOOK = auto()  # posted by another thread, to make the reading thread check whether it should stop
    PEEKED = auto()  # posted by `look` behind the finished events, so that `look` stops waiting there


class ClientStream:
    """Client side of one bidirectional gRPC call. The call starts when this object is created.

    Any thread may call `send` and `cancel`. Two threads may read messages:

    - The reader: one fixed thread, always in `receive`.
    - The borrower: another thread, e.g. the engine thread, in `receive_within`. gRPC's C core cannot wait for
      events with a timeout. While the borrower reads, the reader therefore only enforces the borrower's
      deadline.

    The diagram shows in time order how the borrower takes the stream and returns it. `LOOK` is an event that
    one thread posts to wake the other thread:

        borrower                              reader
                                              in `receive`, waits for events
        receive_within(s): posts LOOK   →     wakes up and releases the stream
        waits for events                      watches (`_watch`): sleeps until the deadline
                                        ←     deadline passed: posts LOOK
        returns a message or None             keeps watching
        no call for KEEP_S, or give_back
                                              waits for events again

    Args:
        channel: Made by `connect`.
        method: Name of the gRPC method, ``/package.Service/Method``.
        poll_window: Decides whether waits for messages poll or sleep.
    """

    def __init__(self, channel: grpc.Channel, method: str, poll_window: PollWindow) -> None:
        self._poll_window = poll_window
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._sending = False
        # True while the core receives a message, and after the last message. `_listen` starts the next
        # receive.
        self._listening = True
        self._status: Any = None
        self._reading = threading.Lock()
        self._taken = False
        # Wakes the reader from `_watch` early: the borrower set an earlier deadline or returned the stream.
        self._sooner = threading.Condition(self._lock)
        self._asleep_until = 0.0
        self._taken_at = 0.0
        self._deadline = math.inf
        # `seconds` of the last `receive_within`.
        self._patience = 0.0
        # Number of messages that the reader has handled: until now, and until the borrower's last check.
        self._handled = 0
        self._handled_known = 0
        self._handling = False
        # Messages that `look` received. The next reading call returns them.
        self._early: deque[bytes] = deque()
        core, metadata = inner_channel(channel)
        starts = (
            (
                (
                    cygrpc.SendInitialMetadataOperation(metadata, NO_FLAGS),
                    cygrpc.ReceiveStatusOnClientOperation(NO_FLAGS),
                ),
                _Tag.STATUS,
            ),
            ((cygrpc.ReceiveInitialMetadataOperation(NO_FLAGS),), _Tag.HEADERS),
            ((cygrpc.ReceiveMessageOperation(NO_FLAGS),), _Tag.RECEIVED),
        )
        # Number of started operations whose event has not arrived yet. With the last event, the core frees
        # the event queue.
        self._due = len(starts)
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
        """Whether the stream has ended, so that no further event arrives."""
        return not self._due

    @property
    def taken(self) -> bool:
        """Whether the borrower has the stream.

        The borrower keeps the stream for some time after `receive_within`.
        """
        return self._taken

    def send(self, message: bytes) -> None:
        """Send a message, or queue it while another message is being sent.

        Never waits. If the stream has ended, the message is dropped.
        """
        with self._lock:
            if not self._sending:
                self._sending = self._operate((cygrpc.SendMessageOperation(message, NO_FLAGS),), _Tag.SENT)
                return
            self._unsent.append(message)
        self.look()  # without a reading thread, the event that ends the current send would stay unprocessed

    def receive(self) -> bytes | None:
        """Wait for the next message. Only the reader, which is one fixed thread, may call this method.

        A message that another thread reads in `receive_within` is not returned here. The result is None if
        the stream ended with status OK. The next call of `receive` confirms that the reader has handled the
        previous message.

        Raises:
            StreamEndedError: The stream ended with another status.
        """
        if self._handling:
            with self._lock:
                self._handling = False
                self._handled += 1
                if self._taken:
                    self._operate((), _Tag.LOOK)
        while True:
            # The borrower may take the stream at any moment. If the lock is taken, watch the borrower's wait.
            if self._taken or not self._reading.acquire(timeout=WATCH_S):
                self._watch()
                continue
            try:
                message = None if self._taken else self._read(lambda: self._taken)
            finally:
                self._reading.release()
            if message is not None:
                self._handling = True
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
        """Wait for the next message for at most `seconds`, on a thread other than the reader.

        Return None in three cases: no message arrived in time, the reader (the thread in `receive`) handled a
        message in the meantime, or the stream has ended. After the end, `receive` reports the status.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            first, self._taken = not self._taken, True
            self._deadline, self._patience = deadline, seconds
            if deadline < self._asleep_until:
                self._sooner.notify()
            if first:
                self._operate((), _Tag.LOOK)
            message = self._early.popleft() if self._early else None
        if message is None and not self._handled_by_reader():
            with self._reading:
                message = self._read(lambda: self._handled_by_reader() or time.monotonic() >= deadline)
        with self._lock:
            self._deadline, self._taken_at = math.inf, time.monotonic()
        return message

    def give_back(self) -> None:
        """Return the stream to the reader. The borrower calls this method when it expects no message soon."""
        with self._lock:
            self._taken = False
            self._sooner.notify()

    def poll(self) -> list[bytes]:
        """Return the messages received so far, without waiting. While the reader reads, return no messages.

        Only the borrower may call this method.
        """
        if not self._taken:
            return []
        self.look()
        with self._lock:
            messages = list(self._early)
            self._early.clear()
        return messages

    def look(self) -> None:
        """Process, without waiting, the operations of this stream that gRPC's C core has completed.

        The method updates `ended`, starts to send the next queued message, and keeps received messages for
        the next call that reads. While another thread reads, the method does nothing, because that thread
        processes the operations. Any thread may call this method.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._listen()
                peeking, look_seen = self._operate((), _Tag.PEEKED), False
            while peeking and self._due:
                event = self._call.next_event()
                with self._lock:
                    message = self._handle(event)
                    if message is not None:
                        self._early.append(message)
                        self._listen()
                peeking = event.tag is not _Tag.PEEKED
                look_seen = look_seen or event.tag is _Tag.LOOK
            if look_seen:  # this LOOK was meant for another thread, so post it again
                with self._lock:
                    self._operate((), _Tag.LOOK)
        finally:
            self._reading.release()

    def _handled_by_reader(self) -> bool:
        with self._lock:
            before, self._handled_known = self._handled_known, self._handled
            return before != self._handled_known

    def cancel(self) -> None:
        """End the stream. May be called more than once."""
        self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "Locally cancelled by application!")

    def drain(self) -> None:
        """Discard all events of a cancelled stream, so that the core can free it. Called by the reader."""
        with contextlib.suppress(StreamEndedError):
            while self.receive() is not None:
                pass

    def _watch(self) -> None:
        """End the borrower's wait on time. Return the stream to the reader after the borrower's last read."""
        with self._lock:
            if self._taken:  # otherwise the borrower has returned the stream in the meantime
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
        """Return the time at which the watching thread wakes up.

        The time is the deadline or earlier. If the deadline has passed, it is the end of a short pause, in
        which the borrower reacts to the LOOK.
        """
        if self._deadline <= now:
            return now + WATCH_S
        return min(self._deadline, now + min(max(WATCH_S, self._patience), LONGEST_WATCH_S))

    def _read(self, enough: Callable[[], bool]) -> bytes | None:
        """Return the next message. Return None if the stream ends, or on a LOOK if `enough` returns True."""
        while True:
            with self._lock:
                if self._early:
                    return self._early.popleft()
                if not self._due:
                    return None
                self._listen()
            self._poll_window.begin()
            event = self._call.next_event()
            with self._lock:
                message = self._handle(event)
            if message is not None:
                return message
            if event.tag is _Tag.LOOK and enough():
                return None

    def _handle(self, event: Any) -> bytes | None:
        """Process an event. Return the message if one arrived. Call with the lock held."""
        self._due -= 1
        if event.tag is _Tag.RECEIVED:
            message: bytes | None = event.batch_operations[0].message()
            self._listening = message is None  # no message follows the end of the stream
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
        """Ask the core for the next message. Call with the lock held."""
        if not self._listening:
            self._listening = True
            self._operate((cygrpc.ReceiveMessageOperation(NO_FLAGS),), _Tag.RECEIVED)

    def _operate(self, operations: tuple[Any, ...], tag: _Tag) -> bool:
        """Start operations, or only wake the reading thread if there are none. Call with the lock held.

        Returns:
            False if the call has ended.
        """
        started = bool(self._call.operate(operations, tag))
        self._due += started
        return started
