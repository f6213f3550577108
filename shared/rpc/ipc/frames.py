"""Splits the byte stream of a unix socket into frames. A frame contains a length, a kind and one message.

File descriptors may accompany a frame. Sending never waits. Receiving waits for at most the given time.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from outrider.shared.base.errors import ProtocolError

HEADER = struct.Struct("<IB")
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_UNSENT_BYTES = 256 * 1024 * 1024
"""Largest number of bytes that a peer may leave unread. A peer that leaves more is treated as gone."""
RECEIVE_BYTES = 256 * 1024
MAX_FILES = 4
FILE_SPACE = socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize)
MANY_CORES = 8
SPIN_S = 100e-6 if (os.cpu_count() or 1) >= MANY_CORES else 0.0
"""How long a receiver polls before it sleeps.

Polling avoids the time to wake a sleeping core. On a host with few cores, the receiver does not poll, because
the peer needs the core.
"""


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    BULK_HELLO = 2
    MAILBOX = 3
    SESSION = 4
    ERROR = 5
    """A `common.v1.ErrorDetail`. The sender closes the connection after this frame."""


class EndOfStream(ConnectionError):
    """The peer has hung up or died, or this side has closed the socket."""


class FrameSocket:
    """A connected unix socket on which frames are sent and received.

    One thread at a time may receive. Any thread may call `send`, `flush` and `close`.

    Args:
        connection: A non-blocking socket. This object owns the socket from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._received = bytearray()
        self._files: deque[int] = deque()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for `poll`. Return -1 after `close`."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are queued. If True, call `flush` when the socket becomes writable."""
        return bool(self._unsent)

    def send(self, kind: FrameKind, payload: bytes, files: Sequence[int] = ()) -> None:
        """Send a frame without waiting. Bytes that the socket does not accept now are queued for `flush`.

        Args:
            kind: The kind of the frame.
            payload: The message, of at most `MAX_FRAME_BYTES`.
            files: Descriptors to send with the frame. They stay open on this side.

        Raises:
            EndOfStream: The peer is gone, or the send queue is full because the peer does not read.
            ProtocolError: The payload is too large.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"A message of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}.", field="frame"
            )
        frame = memoryview(HEADER.pack(len(payload), kind) + payload)
        with self._send_lock:
            if files:
                frame = self._send_files(frame, files)
            if not self._unsent:
                frame = self._send_some(frame)
            if frame:
                self._unsent.append(frame)
                self._unsent_bytes += len(frame)
                if self._unsent_bytes > MAX_UNSENT_BYTES:
                    raise EndOfStream("the peer has left too many bytes unread")

    def flush(self) -> None:
        """Send the queued bytes that the socket accepts now.

        Raises:
            EndOfStream: The peer is gone.
        """
        with self._send_lock:
            while self._unsent:
                first = self._unsent[0]
                rest = self._send_some(first)
                self._unsent_bytes -= len(first) - len(rest)
                if rest:
                    self._unsent[0] = rest
                    return
                self._unsent.popleft()

    def receive(self, timeout_s: float = 0.0, awake_s: float = SPIN_S) -> tuple[FrameKind, bytes] | None:
        """Return the next frame, or None if no complete frame arrives within `timeout_s` seconds.

        The wait polls for the first `awake_s` seconds, then sleeps. Queued bytes are sent in the meantime.

        Raises:
            EndOfStream: The stream has ended.
            ProtocolError: The peer sends bytes that are not frames of this project.
        """
        with self._receive_lock:
            deadline = time.monotonic() + timeout_s if timeout_s else 0.0
            spin_until = deadline - timeout_s + awake_s
            while True:
                frame = self._take()
                if frame is not None:
                    return frame
                if self._read_some():
                    continue
                now = time.monotonic() if timeout_s else 0.0
                if now >= deadline:
                    return None
                if now >= spin_until:
                    self._sleep(deadline - now)

    def take_files(self, count: int) -> list[int]:
        """Return `count` descriptors that came with the frames so far. The caller closes them.

        Raises:
            ProtocolError: Fewer than `count` descriptors came.
        """
        if len(self._files) < count:
            raise ProtocolError(
                f"The peer announced {count} descriptors but sent {len(self._files)}.", field="mailbox"
            )
        return [self._files.popleft() for _ in range(count)]

    def close(self) -> None:
        """Hang up. May be called more than once. A thread waiting in `receive` gets `EndOfStream`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Close the descriptor only after every thread has stopped using it, because the system may then reuse
        # its number.
        with self._receive_lock, self._send_lock:
            self._socket.close()
            while self._files:
                os.close(self._files.popleft())

    def _take(self) -> tuple[FrameKind, bytes] | None:
        if len(self._received) < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"A frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}.", field="frame"
            )
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        try:
            known = FrameKind(kind)
        except ValueError:
            raise ProtocolError(
                f"A frame has the unknown kind {kind}. Run the same release on both sides.", field="frame"
            ) from None
        payload = bytes(memoryview(self._received)[HEADER.size : end])
        del self._received[:end]
        return known, payload

    def _read_some(self) -> bool:
        """Read the bytes that have arrived. Return False if there are none."""
        try:
            count, ancillary, _flags, _address = self._socket.recvmsg_into(
                [self._buffer], FILE_SPACE, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise EndOfStream(str(error)) from None
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files = array.array("i")
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
                self._files.extend(files)
        if not count:
            raise EndOfStream("the peer has hung up")
        self._received += self._buffer[:count]
        return True

    def _sleep(self, timeout_s: float) -> None:
        if self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout_s) & select.POLLOUT:
            self.flush()

    def _poll(self, events: int, timeout_s: float) -> int:
        """Sleep until one of `events` occurs. Return the events that occurred."""
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError:
            raise EndOfStream("closed") from None
        ready = poll.poll(timeout_s * 1000)
        return ready[0][1] if ready else 0

    def _send_some(self, frame: memoryview) -> memoryview:
        """Return the bytes that the socket did not accept."""
        while frame:
            try:
                frame = frame[self._socket.send(frame, socket.MSG_NOSIGNAL) :]
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise EndOfStream(str(error)) from None
        return frame

    def _send_files(self, frame: memoryview, files: Sequence[int]) -> memoryview:
        """Send the descriptors together with the first bytes of the frame. Return the remaining bytes.

        The socket's buffer always has room, because only handshakes send descriptors.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        try:
            return frame[self._socket.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL) :]
        except OSError as error:
            raise EndOfStream(str(error)) from None
