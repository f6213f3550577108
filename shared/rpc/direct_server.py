"""Server side of low-latency bidirectional gRPC streams. `shared.rpc.direct` explains how they work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the library has no types for it

from outrider.shared.rpc.direct import NO_FLAGS
from outrider.shared.rpc.polling import PollWindow

FLUSH_S = 5.0

Then = Callable[[], None]
_Callbacks = tuple[None, tuple[()]]
_NO_CALLBACKS: _Callbacks = (None, ())


class ServerStream:
    """Server side of one bidirectional gRPC call. grpcio itself exchanges the call's first messages.

    The handler of the call is an ordinary grpcio handler:

    1. It reads the first messages from its iterator, and yields at least one reply.
    2. It calls `start` on this object. From then on, it neither reads nor yields.
    3. It calls `flush` on this object before it returns or raises.

    Args:
        context: grpcio's context of the call.
        on_message: Called with every further message, one at a time, on the server's only polling thread.
            While this function blocks, all other calls of the server wait. The function may wait for one
            forward pass of a draft's GPU, but not longer.
        on_end: Called at least once after the stream's end, on any thread. The argument is the exception that
            `on_message` raised, or None if the peer has ended the stream.
        max_unsent: Largest number of messages to queue for a peer that does not read. If the queue is full,
            the next message ends the stream.
        poll_window: Decides whether the server's polling thread busy-polls or sleeps while it waits.
    """

    def __init__(
        self,
        context: grpc.ServicerContext,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
        max_unsent: int,
        poll_window: PollWindow,
    ) -> None:
        self._poll_window = poll_window
        self._call = cast(Any, context)._rpc_event.call
        self._on_message = on_message
        self._on_end = on_end
        self._max_unsent = max_unsent
        self._lock = threading.Lock()
        self._unsent: deque[tuple[bytes, Then | None]] = deque()
        # The `then` callback of the message being sent.
        self._then: Then | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._ended = False
        if not context.add_callback(self._gone):
            self._gone()

    def start(self) -> None:
        """Start receiving."""
        self._receive()

    def send(self, message: bytes, then: Then | None = None) -> None:
        """Send a message, or queue it while another message is being sent. Never waits.

        May be called from any thread, after the handler's first reply.

        Args:
            message: The bytes of the message.
            then: Called on the server's polling thread when the message is on its way. Never called if the
                stream ends earlier.
        """
        with self._lock:
            if self._ended:
                return
            if self._idle.is_set():
                self._start_send(message, then)
                return
            self._unsent.append((message, then))
            overrun = len(self._unsent) > self._max_unsent
        if overrun:
            self._gone()

    def flush(self) -> None:
        """Refuse further messages, and wait up to `FLUSH_S` until all accepted messages are on their way."""
        with self._lock:
            self._ended = True
        if not self._idle.wait(FLUSH_S):
            with self._lock:
                self._unsent.clear()

    def _start_send(self, message: bytes, then: Then | None) -> None:
        """Start sending a message. Call with the lock held, because `_sent` must run after this method."""
        self._then = then
        if not self._call.start_server_batch((cygrpc.SendMessageOperation(message, NO_FLAGS),), self._sent):
            self._idle.clear()
        else:
            self._idle.set()

    def _sent(self, event: Any) -> _Callbacks:
        with self._lock:
            then = self._then if event.success else None
            if event.success and self._unsent:
                self._start_send(*self._unsent.popleft())
            else:
                self._unsent.clear()
                self._idle.set()
        if then is not None:
            try:
                then()
            except Exception as error:  # the polling thread serves all calls and must survive
                self._on_end(error)
        self._poll_window.begin()
        return _NO_CALLBACKS

    def _receive(self) -> None:
        if self._call.start_server_batch((cygrpc.ReceiveMessageOperation(NO_FLAGS),), self._received):
            self._on_end(None)

    def _received(self, event: Any) -> _Callbacks:
        message: bytes | None = event.batch_operations[0].message()
        try:
            if message is None:
                self._poll_window.rest()
                self._on_end(None)
            else:
                self._on_message(message)
                self._receive()
        except Exception as error:  # the polling thread serves all calls and must survive
            self._on_end(error)
        self._poll_window.begin()
        return _NO_CALLBACKS

    def _gone(self) -> None:
        with self._lock:
            self._ended = True
            self._unsent.clear()
        self._on_end(None)
