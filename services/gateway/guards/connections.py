"""Limits the connections of the REST port: their number, and the wait for each complete request head.

A client needs no key to connect. Without these limits, silent connections would use up all file descriptors.
`shared/rpc/options.py` has the corresponding limits of the gRPC port.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import time
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.options import OPEN_FILES_SHARE

WANTED_FILES = 65_536
"""Number of file descriptors to request. With more, ports or memory would run out first."""
OTHER_FILES = 256
"""Number of file descriptors reserved for other uses than client connections: the target, log files."""
ACCEPTED_AT_ONCE = 64
"""Number of connections that asyncio accepts before the gateway can close any of them."""
MIN_CONNECTIONS = 16
LOG_INTERVAL_S = 10.0
# Interval between checks of a half-closed connection. It doubles from check to check.
FIRST_PEER_CHECK_S = 0.005
LAST_PEER_CHECK_S = 0.2
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment in a stream of server-sent events, which clients ignore."""
EVENT_STREAM = "event_stream"
"""Key in the state of a request whose reply is a stream of server-sent events that has begun."""
TCP_CLOSE = 7
"""Linux's state of a connection that the peer has reset."""
_log = get_logger("outrider.gateway.connections")


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to `WANTED_FILES`.

    If the hard limit is lower, raise the soft limit to the hard limit.

    Returns:
        The soft limit that is now in force, or `WANTED_FILES` if it is unlimited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
        return wanted
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft


def connection_cap(asked: int, open_files: int) -> int:
    """Return the largest number of connections that the REST port accepts.

    Args:
        asked: Limit that the operator set. With 0, use the largest number that the limit of open files
            allows.
        open_files: Limit of open files of this process.
    """
    for_grpc = open_files // OPEN_FILES_SHARE
    fitting = max(MIN_CONNECTIONS, open_files - for_grpc - OTHER_FILES - ACCEPTED_AT_ONCE)
    return min(asked, fitting) if asked else fitting


def limit_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log at most one line per `LOG_INTERVAL_S` when the event loop cannot accept connections.

    While the process has no free file descriptor, asyncio reports each failed attempt, with a traceback.
    """
    lines = _LimitedLines()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket.accept()" not in str(context.get("message")) or not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif failed := lines.count():
            _log.error("cannot accept connections", error=error.strerror, failed=failed)

    loop.set_exception_handler(handle)


class _LimitedLines:
    """Counts events that are too many to log one by one."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._unlogged = 0

    def count(self) -> int:
        """Count one event. If a line is due, return the number of events since the last line, otherwise 0."""
        self._unlogged += 1
        if (now := time.monotonic()) - self._logged_at < LOG_INTERVAL_S:
            return 0
        unlogged, self._logged_at, self._unlogged = self._unlogged, now, 0
        return unlogged


class ConnectionGuard:
    """Counts the connections of the REST port, and closes those that wait too long for a request head.

    At the connection limit, a new connection replaces the connection that has waited longest for its head. If
    every open connection has a running request, the guard closes the new connection instead.

    Attributes:
        limit: Largest number of connections.
        head_timeout_s: Longest wait for a complete request head, in seconds. The wait begins with the
            connection or with the end of the previous request.
        closed: Number of connections that were closed because of the limit.
    """

    def __init__(self, limit: int, head_timeout_s: float) -> None:
        self.limit = limit
        self.head_timeout_s = head_timeout_s
        self.closed = 0
        self._open: set[GuardedProtocol] = set()
        # Connections that wait for a head, in the order in which they began to wait. The values are unused.
        self._waiting: dict[GuardedProtocol, None] = {}
        self._lines = _LimitedLines()

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """Make the protocol of a new connection. This is uvicorn's `http_protocol_class`."""
        return GuardedProtocol(self, config, server_state, app_state, _loop)

    def opened(self, connection: GuardedProtocol) -> None:
        """Count a new connection, and close a connection if there are now too many."""
        self._open.add(connection)
        if len(self._open) > self.limit:
            victim = next(iter(self._waiting), connection)
            self._note_closed()
            self.lost(victim)
            victim.transport.abort()

    def lost(self, connection: GuardedProtocol) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def waits(self, connection: GuardedProtocol, waiting: bool) -> None:
        """Note whether a connection waits for a request head."""
        if waiting and connection in self._open:
            self._waiting.setdefault(connection, None)
        elif not waiting:
            self._waiting.pop(connection, None)

    def _note_closed(self) -> None:
        self.closed += 1
        if closed := self._lines.count():
            _log.warning("too many connections", limit=self.limit, closed=closed)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with a time limit for each complete request head.

    It also replies to a client that has closed its own direction of the connection after the request. uvicorn
    would treat such a client as disconnected.
    """

    def __init__(self, guard: ConnectionGuard, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._guard = guard
        self._head_timer: asyncio.TimerHandle | None = None
        self._peer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close a connection if there are too many."""
        super().connection_made(transport)
        self._guard.opened(self)
        self._follow_head()

    def data_received(self, data: bytes) -> None:
        """Parse bytes. They may complete a head."""
        super().data_received(data)
        self._follow_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next head."""
        super().on_response_complete()
        self._follow_head()

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
        if self._peer_timer is not None:
            self._peer_timer.cancel()
        self._guard.lost(self)
        super().connection_lost(exc)

    def _follow_peer(self, wait_s: float) -> None:
        """Check repeatedly whether the peer has reset the connection. asyncio no longer reads from it."""
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            self.transport.abort()
        elif not self.transport.is_closing():
            longer_s = min(2 * wait_s, LAST_PEER_CHECK_S)
            self._peer_timer = self.loop.call_later(wait_s, self._follow_peer, longer_s)

    def _follow_head(self) -> None:
        """Start the timer if no request is running, or stop it otherwise. Do not extend a running timer."""
        waiting = self.cycle is None or self.cycle.response_complete
        self._guard.waits(self, waiting)
        if not waiting:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._guard.head_timeout_s, self._close_headless)

    def _close_headless(self) -> None:
        self._head_timer = None
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
