"""The control channel: one TCP connection from each rank to rank 0, with commands one way and reports the other.

A frame is a length of four bytes and that many bytes. A connection that ends is how a dead process is noticed; beats tell a stopped one
from one that has nothing to say.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from torch._C._distributed_c10d import PrefixStore, Store

from outrider.shared.base.errors import ConfigurationError, ProtocolError, UnavailableError

MAX_FRAME = 1 << 16
MAX_GREETING = 64
GREETING_S = 5.0
"""How long a rank may take from its connection to its greeting, which it sends at once."""
BEAT_S = 1.0
CONNECT_S = 5.0
RETRY_S = 0.1
ADDRESS_KEY = "outrider/control"
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds and tries: a host that vanished without a word is noticed within ten seconds."""

_LENGTH = struct.Struct("<I")


class ReportKind(IntEnum):
    """What a rank tells rank 0."""

    BEAT = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Report:
    """One message to rank 0; `text` is what DONE stands for, or what failed."""

    kind: ReportKind
    text: str = ""


class Connection:
    """Frames over a socket. One thread may receive; any may send.

    Attributes:
        awake_s: For so long `receive` asks for the next frame again and again before it sleeps until one comes. To wake a core takes ten
            times what a frame does.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.awake_s = 0.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket = sock
        self._lock = threading.Lock()
        self._received = bytearray()

    def send(self, body: bytes) -> None:
        """Send one frame.

        Raises:
            OSError: The peer is gone.
        """
        with self._lock:
            self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> bytes | None:
        """Wait for a frame; None when the peer is gone.

        Raises:
            ProtocolError: What came is no frame.
        """
        self._stay_awake()
        header = self._take(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME:
            raise ProtocolError(
                f"tensor parallel control: a frame of {length} bytes; do all ranks run one version?",
                field="tp",
            )
        return self._take(length)

    def receive_by(self, deadline: float, most: int) -> bytes | None:
        """Wait for one frame of a peer that may be anybody; None if it is longer than `most`, not whole by `deadline`, or the peer is gone.

        Args:
            deadline: Of the monotonic clock, for the whole frame.
            most: Bytes.
        """
        needed = _LENGTH.size
        try:
            while len(self._received) < needed:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self.socket.settimeout(remaining)
                part = self.socket.recv(needed - len(self._received))
                if not part:
                    return None
                self._received += part
                if len(self._received) == _LENGTH.size:
                    (length,) = _LENGTH.unpack(self._received)
                    if length > most:
                        return None
                    needed += length
            self.socket.settimeout(None)
        except OSError:
            return None
        body = bytes(self._received[_LENGTH.size :])
        self._received.clear()
        return body

    def report(self, report: Report) -> None:
        """Send a report, cut to what a frame holds."""
        self.send(bytes((report.kind,)) + report.text.encode()[: MAX_FRAME - 1])

    def receive_report(self) -> Report | None:
        """Wait for a report; None when the peer is gone."""
        body = self.receive()
        if not body:
            return None
        return Report(ReportKind(body[0]), body[1:].decode(errors="replace"))

    def close(self) -> None:
        """Close the connection; a thread that receives sees the end of it."""
        with contextlib.suppress(OSError):  # already gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _stay_awake(self) -> None:
        """Return when something is there, or after `awake_s`."""
        if not self.awake_s or self._received:
            return
        deadline = time.monotonic() + self.awake_s
        while time.monotonic() < deadline:
            try:
                self._received += self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                continue
            except OSError:
                return  # `_take` meets it again

    def _take(self, count: int) -> bytes | None:
        while len(self._received) < count:
            try:
                part = self.socket.recv(1 << 16)
            except OSError:
                return None
            if not part:
                return None
            self._received += part
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


def accept_ranks(
    store: Store, host: str, size: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> dict[int, Connection]:
    """Listen, publish the address in the store, and wait for ranks 1 … size - 1.

    Args:
        store: Where the ranks meet; the address and a secret go there, so that nobody else takes a rank's place.
        host: The address of this machine that the other ranks reach.
        size: Number of ranks.
        timeout_s: How long all of them may take.
        check: Called while waiting; raises to give up (a process died).

    Raises:
        UnavailableError: Not all came in time.
        ConfigurationError: This machine has no such address.
    """
    secret = secrets.token_hex(16)
    connections: dict[int, Connection] = {}
    deadline = time.monotonic() + timeout_s
    with _listen(host) as listener, contextlib.ExitStack() as undo:
        undo.callback(_close, connections)
        listener.settimeout(0.1)
        store.set(ADDRESS_KEY, f"{host} {listener.getsockname()[1]} {secret}")
        while len(connections) < size - 1:
            check()
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, size)) - set(connections))
                raise UnavailableError(
                    f"tp: ranks {missing} did not come within {timeout_s:g} s; their own output says why.",
                    field="tp",
                )
            try:
                sock, _peer = listener.accept()
            except TimeoutError:
                continue
            connection = Connection(sock)
            rank = _greeted(
                connection.receive_by(min(deadline, time.monotonic() + GREETING_S), MAX_GREETING),
                secret,
                size,
            )
            if rank is None or rank in connections:
                connection.close()
                continue
            connections[rank] = connection
        undo.pop_all()
    return connections


def connect_rank(store: Store, rank: int, timeout_s: float) -> Connection:
    """Connect this rank to rank 0, whose address is in the store, or soon will be.

    A store that outlives the ranks (torchrun's, when it starts them anew) still holds the address of the last rank 0, where nobody listens.

    Raises:
        UnavailableError: Rank 0 cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        host, port, secret = bytes(store.get(ADDRESS_KEY)).decode().split(" ")
        try:
            connection = Connection(socket.create_connection((host, int(port)), CONNECT_S))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"tp: rank {rank} cannot reach rank 0 at {host}:{port} ({error}).", field="tp"
                ) from error
            time.sleep(RETRY_S)
    connection.socket.settimeout(None)
    connection.send(f"{secret} {rank}".encode())
    return connection


def store_of_these(store: Store) -> Store:
    """Return a part of the store that no earlier ranks have used; for ranks that are connected.

    The number of a restart does not tell them apart: torchrun counts those on each host that were due to a failure there.
    """
    return PrefixStore(bytes(store.get(ADDRESS_KEY)).decode().split(" ")[2], store)


def beat_until_gone(connection: Connection, grace_s: float) -> None:
    """Tell rank 0 each second that this process runs, on a thread; end the process when rank 0 is gone.

    A rank that waits in a collective for a peer that died cannot be woken otherwise.

    Args:
        connection: To rank 0.
        grace_s: Time for an orderly end, after which the process is ended.
    """
    threading.Thread(target=_beat, args=(connection, grace_s), name="tp-beat", daemon=True).start()


def _beat(connection: Connection, grace_s: float) -> None:
    poller = select.poll()
    poller.register(connection.socket, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
    with contextlib.suppress(OSError, ValueError):  # gone
        while not poller.poll(BEAT_S * 1000):
            connection.report(Report(ReportKind.BEAT))
    time.sleep(grace_s)
    os._exit(1)


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigurationError(
            f"MASTER_ADDR: rank 0 cannot listen on {host} ({error.strerror or error}); it must be an address of the host of rank 0.",
            field="MASTER_ADDR",
        ) from error


def _close(connections: Mapping[int, Connection]) -> None:
    for connection in connections.values():
        connection.close()


def _greeted(greeting: bytes | None, secret: str, size: int) -> int | None:
    """Return the rank of a connection that knows the secret, else None."""
    said, _, rank = (greeting or b"").decode(errors="replace").partition(" ")
    if (
        not hmac.compare_digest(said.encode(), secret.encode())
        or not rank.isdecimal()
        or not 0 < int(rank) < size
    ):
        return None
    return int(rank)
