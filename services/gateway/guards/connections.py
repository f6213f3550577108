"""Limits the connections of the REST port: their number, and the waits for request heads and readers.

A client needs no key to connect. Without these limits, connections that send nothing, or that read nothing,
would use up all file descriptors. `guards/open_files.py` computes the largest number of connections, and
`shared/rpc/options.py` has the corresponding limits of the gRPC port.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import ssl
import struct
import sys
import termios
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from outrider.services.gateway.guards.bounded_reading import BoundedReading
from outrider.services.gateway.guards.open_files import LimitedLines
from outrider.shared.obs.logging import get_logger

# Interval between checks of a half-closed connection. It doubles from check to check.
FIRST_PEER_CHECK_S = 0.005
LAST_PEER_CHECK_S = 0.2
HEAD_LIMIT_BYTES = 64 * 1024
"""Largest request head, and number of unparsed bytes at which a connection reads no more."""
UNREAD_CHECK_S = 1.0
"""Interval between checks of a reply that the client does not read.

A connection without progress since the last check may be replaced by a new one.
"""
TLS_CLOSE_S = 600.0
"""Time to close a TLS connection, from the end of its last reply. A slow client may still read the reply."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment in a stream of server-sent events, which clients ignore."""
EVENT_STREAM = "event_stream"
"""Key in the state of a request whose reply is a stream of server-sent events that has begun."""
TCP_CLOSE = 7
"""Linux's state of a connection that the peer has reset."""
Refusal = Callable[[h11.RemoteProtocolError], tuple[int, list[tuple[bytes, bytes]], bytes]]
"""Returns the status, the headers and the body of the reply to bytes that are not a valid request."""
_log = get_logger("outrider.gateway.connections")


class ConnectionGuard:
    """Counts the connections of the REST port, and closes those that send or read nothing for too long.

    At the connection limit, a new connection replaces the one whose client has read nothing for the longest
    time. If there is none, it replaces the connection that has waited longest for its TLS handshake or
    request head. Otherwise the guard closes the new connection.

    Attributes:
        limit: Largest number of connections. Connections count from the moment that they are accepted.
        head_timeout_s: Longest wait for a TLS handshake, and for a complete request head, in seconds. The
            wait for a head begins with the connection, or when the kernel has the whole previous reply.
        unread_timeout_s: Time for which a client may read nothing of a reply, in seconds.
        stream_timeout_s: The same time for a stream of server-sent events. It must be long enough for the
            stream's own limit, which ends the stream with an error.
        refusal: Function that returns the reply to bytes that are not a valid request.
        tls: Certificates of the port. Without them, connections are not encrypted.
        closed: Number of connections that were closed because of the limit.
    """

    def __init__(
        self,
        limit: int,
        head_timeout_s: float,
        unread_timeout_s: float,
        stream_timeout_s: float,
        refusal: Refusal,
    ) -> None:
        self.limit = limit
        self.refusal = refusal
        self.head_timeout_s = head_timeout_s
        self.unread_timeout_s = unread_timeout_s
        self.stream_timeout_s = stream_timeout_s
        self.tls: ssl.SSLContext | None = None
        self.closed = 0
        self._open: set[GuardedProtocol | TlsConnection] = set()
        # Connections that wait for a handshake or a head, in the order in which they began to wait. The
        # values of both dictionaries are unused.
        self._waiting: dict[GuardedProtocol | TlsConnection, None] = {}
        # Connections whose clients do not read, in the order in which they were found.
        self._unread: dict[GuardedProtocol | TlsConnection, None] = {}
        self._lines = LimitedLines()

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.BaseProtocol:
        """Make the protocol of a new connection. This is uvicorn's `http_protocol_class`."""
        connection = GuardedProtocol(self, config, server_state, app_state, _loop)
        return connection if self.tls is None else TlsConnection(self, connection, self.tls)

    def opened(self, connection: GuardedProtocol | TlsConnection) -> None:
        """Count a new connection, and close a connection if there are now too many."""
        self._open.add(connection)
        if len(self._open) > self.limit:
            victim = next(iter(self._unread), None) or next(iter(self._waiting), connection)
            self._note_closed()
            self.lost(victim)
            victim.abort()

    def lost(self, connection: GuardedProtocol | TlsConnection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._unread.pop(connection, None)

    def waits(self, connection: GuardedProtocol | TlsConnection, waiting: bool) -> None:
        """Note whether a connection waits for a handshake or a request head."""
        self._note(self._waiting, connection, waiting)

    def reads_nothing(self, connection: GuardedProtocol, stuck: bool) -> None:
        """Note whether the client of a connection does not read its reply."""
        self._note(self._unread, connection, stuck)

    def _note(
        self,
        found: dict[GuardedProtocol | TlsConnection, None],
        connection: GuardedProtocol | TlsConnection,
        applies: bool,
    ) -> None:
        if applies and connection in self._open:
            found.setdefault(connection, None)
        elif not applies:
            found.pop(connection, None)

    def _note_closed(self) -> None:
        self.closed += 1
        if closed := self._lines.count():
            _log.warning("too many connections", limit=self.limit, closed=closed)


class TlsConnection(SSLProtocol):
    """asyncio's TLS protocol. The guard counts its connection before the handshake, too.

    asyncio's server would report a connection only after the handshake.

    Attributes:
        socket_transport: Transport of the encrypted bytes, once the connection is made.
    """

    def __init__(self, guard: ConnectionGuard, served: GuardedProtocol, context: ssl.SSLContext) -> None:
        # The type stubs do not allow a missing waiter.
        super().__init__(
            served.loop,
            served,
            context,
            None,  # type: ignore[arg-type]
            server_side=True,
            ssl_handshake_timeout=guard.head_timeout_s,  # type: ignore[arg-type]
            ssl_shutdown_timeout=TLS_CLOSE_S,
        )
        self._guard = guard
        self._served = served
        self.socket_transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and begin the handshake."""
        self.socket_transport = transport
        self._served.below = self
        self._guard.opened(self)
        self._guard.waits(self, True)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self._guard.lost(self)
        super().connection_lost(exc)

    def unsent(self) -> int:
        """Return the number of bytes that the kernel does not have yet, encrypted or not."""
        assert self.socket_transport is not None
        own: int = self._get_write_buffer_size()  # type: ignore[attr-defined]  # the type stubs lack it
        return own + self.socket_transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once, in whatever state it is."""
        if self.socket_transport is not None:
            self.socket_transport.abort()


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with time limits for each complete request head and for unread replies.

    It also replies to a client that has closed its own direction of the connection after the request. uvicorn
    would treat such a client as disconnected. The number of bytes of requests that wait for the running one
    is bounded.

    Attributes:
        below: The TLS protocol of this connection, if it is encrypted.
    """

    def __init__(self, guard: ConnectionGuard, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.below: TlsConnection | None = None
        self._guard = guard
        self._head_timer: asyncio.TimerHandle | None = None
        self._peer_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close a connection if there are too many."""
        super().connection_made(transport)
        self.flow = BoundedReading(transport, self._is_full)
        if self.below is not None:
            self._guard.lost(self.below)
        self._guard.opened(self)
        self._follow_head()

    def data_received(self, data: bytes) -> None:
        """Parse bytes. They may complete a head."""
        super().data_received(data)
        if self._is_full() and not self.transport.is_closing():
            # uvicorn sometimes reads on without noting it in `flow`, which would then not pause again.
            self.transport.pause_reading()
            self.flow.read_paused = True
        self._follow_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a valid request, and close the connection.

        If a reply has begun, it ends here. uvicorn calls this method while it handles the parser's error.
        """
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        may_reply = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:
            # The body of this request is not valid. Its route must send nothing after this reply.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if may_reply:
            status, headers, body = self._guard.refusal(error)
            head = h11.Response(
                status_code=status,
                headers=[*headers, (b"connection", b"close")],
                reason=HTTPStatus(status).phrase.encode(),
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Begin to wait for the next head."""
        super().on_response_complete()
        self._follow_head()

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads."""
        super().pause_writing()
        self._follow_unread()

    def resume_writing(self) -> None:
        """Stop to watch, because the client has read most of what it had not read."""
        super().resume_writing()
        self._stop_unread()
        self._follow_head()

    def abort(self) -> None:
        """Close the connection at once. Bytes that the kernel does not have yet are lost."""
        (self.below or self.transport).abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open while a request is running, until the client turns out to be gone.

        A client sends the same packet whether it closes the whole connection or only its own direction. After
        it has closed the whole connection, it answers the next bytes with a reset. This method therefore
        sends bytes that clients ignore: an interim reply (100 Continue), or a comment in a stream.
        """
        cycle = self.cycle
        # A TLS connection cannot stay half-open.
        if self.scheme == "https" or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        if self._peer_timer is None:
            probe: h11.Event | None = None
            if cycle.scope["state"].get(EVENT_STREAM):
                probe = h11.Data(data=KEEP_ALIVE)
            elif not cycle.response_started and self.conn.their_http_version != b"1.0":
                probe = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            if probe is not None:
                self.transport.write(self.conn.send(probe) or b"")
            self._follow_peer(FIRST_PEER_CHECK_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        self._stop_unread()
        if self._peer_timer is not None:
            self._peer_timer.cancel()
        self._guard.lost(self)
        super().connection_lost(exc)

    def _is_full(self) -> bool:
        """Return True if the unparsed bytes contain a complete request, or a head that is too long."""
        return len(self.conn.trailing_data[0]) > HEAD_LIMIT_BYTES

    def _follow_peer(self, wait_s: float) -> None:
        """Check repeatedly whether the peer has reset the connection. asyncio no longer reads from it."""
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            self.transport.abort()
        elif not self.transport.is_closing():
            longer_s = min(2 * wait_s, LAST_PEER_CHECK_S)
            self._peer_timer = self.loop.call_later(wait_s, self._follow_peer, longer_s)

    def _follow_head(self) -> None:
        """Start the timer if the connection waits for a head, or stop it otherwise. Do not extend it.

        While the client still reads the previous reply, watch whether it reads.
        """
        running = self.cycle is not None and not self.cycle.response_complete
        reading = not running and self._unsent() > 0
        self._guard.waits(self, not running and not reading)
        if running or reading:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._guard.head_timeout_s, self._close_headless)
        if reading:
            self._follow_unread()
        elif running and not self.flow.write_paused:
            self._stop_unread()

    def _close_headless(self) -> None:
        self._head_timer = None
        self.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _follow_unread(self) -> None:
        """Watch whether the client reads, while nothing new can be written."""
        if self._unread_timer is None:
            self._check_unread(math.inf, self.loop.time())

    def _stop_unread(self) -> None:
        self._guard.reads_nothing(self, False)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _check_unread(self, least: float, read_at: float) -> None:
        """Abort the connection if the client has read nothing for too long.

        Args:
            least: Number of unread bytes at the last check.
            read_at: Time of the event loop at which the number last became smaller, in seconds.
        """
        self._unread_timer = None
        now, guard = self.loop.time(), self._guard
        if not self._unsent():
            guard.reads_nothing(self, False)
            self._follow_head()
            return
        streams = self.cycle is not None and self.cycle.scope["state"].get(EVENT_STREAM)
        limit_s = guard.stream_timeout_s if streams else guard.unread_timeout_s
        unread = self._unsent() + self._unacknowledged()
        if unread < least:
            least, read_at = unread, now
        elif now - read_at >= limit_s:
            self.abort()
            return
        # A stream has its own rule for slow readers.
        guard.reads_nothing(self, read_at < now and not streams)
        wait_s = min(UNREAD_CHECK_S, limit_s / 4)
        self._unread_timer = self.loop.call_later(wait_s, self._check_unread, least, read_at)

    def _unsent(self) -> int:
        """Return the number of bytes of replies that the kernel does not have yet."""
        return self.transport.get_write_buffer_size() if self.below is None else self.below.unsent()

    def _unacknowledged(self) -> int:
        """Return the number of bytes that the kernel has, and that the client's kernel has not acknowledged.

        The kernel accepts more bytes only when much of its own buffer is free, so that the number of unsent
        bytes alone would not show a slow reader's progress.
        """
        transport = self.transport if self.below is None else self.below.socket_transport
        assert transport is not None
        if (number := transport.get_extra_info("socket").fileno()) < 0:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)))[0])
