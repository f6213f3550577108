"""The control channel between rank 0 and each other rank. Ends a rank's process if rank 0 is gone.

Each rank has one TCP connection to rank 0. Rank 0 sends commands over the connection, and the rank sends
reports. Each message is one frame: a length of four bytes, followed by that many bytes.

A closed connection shows that the peer's process has died. A stopped process keeps its connection open, so
each rank also sends regular heartbeats (*beats*). `beat_until_gone` sends the beats, and ends the rank's
process when the connection to rank 0 closes.
"""

from __future__ import annotations

import contextlib
import hmac
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
from outrider.shared.obs.queued_stream import exit_now

MAX_FRAME = 1 << 16
MAX_GREETING = 64
GREETING_S = 5.0
"""Time limit for a rank's greeting. A rank sends its greeting as soon as it is connected."""
BEAT_S = 1.0
CONNECT_S = 5.0
RETRY_S = 0.1
ADDRESS_KEY = "outrider/control"
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""TCP keepalive options: idle seconds, seconds between probes, and number of probes.

A host that vanishes without closing its connection is noticed within 10 s.
"""

_LENGTH = struct.Struct("<I")


class ReportKind(IntEnum):
    """The kinds of messages that a rank sends to rank 0."""

    BEAT = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class RankReport:
    """A report from a rank. `text` names the finished work (DONE) or describes the failure (FAILED)."""

    kind: ReportKind
    text: str = ""


class RankConnection:
    """Connection between two ranks: sends and receives frames. Any thread may send, but only one may receive.

    Attributes:
        awake_s: Seconds for which `receive` polls the socket before it blocks. Polling avoids the wake-up of
            a sleeping core, which takes ten times as long as receiving a frame.
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
            OSError: The peer has closed the connection.
        """
        with self._lock:
            self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> bytes | None:
        """Wait for a frame. Return None if the peer has closed the connection.

        Raises:
            ProtocolError: The received bytes are not a frame.
        """
        self._stay_awake()
        header = self._take(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME:
            raise ProtocolError(
                f"tensor parallel control: received a frame of {length} bytes; "
                "run the same version on all ranks",
                field="tp",
            )
        return self._take(length)

    def receive_by(self, deadline: float, most: int) -> bytes | None:
        """Wait for one frame from a peer that has not proved its identity yet.

        Return None in three cases: the frame is longer than `most`, the frame is incomplete at `deadline`, or
        the peer closes the connection.

        Args:
            deadline: Time on the monotonic clock by which the whole frame must have arrived.
            most: Longest accepted frame, in bytes.
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

    def report(self, report: RankReport) -> None:
        """Send a report, truncated to the maximum frame size."""
        self.send(bytes((report.kind,)) + report.text.encode()[: MAX_FRAME - 1])

    def receive_report(self) -> RankReport | None:
        """Wait for a report. Return None if the peer has closed the connection."""
        body = self.receive()
        if not body:
            return None
        return RankReport(ReportKind(body[0]), body[1:].decode(errors="replace"))

    def close(self) -> None:
        """Close the connection. If a thread is blocked in `receive`, its call returns None."""
        with contextlib.suppress(OSError):  # The peer has closed the socket already.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _stay_awake(self) -> None:
        """Poll until data has arrived or `awake_s` is over."""
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
                return  # `_take` will get the same error and handle it.

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
) -> dict[int, RankConnection]:
    """On rank 0: listen on a port, publish the address in the store, and wait until all other ranks connect.

    Args:
        store: The ranks' common key-value store. The function writes rank 0's address and a secret to the
            store. A connection is accepted only if its greeting contains the secret.
        host: This machine's address as seen by the other ranks.
        size: Number of ranks.
        timeout_s: Time limit in seconds for the whole wait, not for each rank.
        check: Called repeatedly during the wait. `check` can end the wait by raising an error, for example if
            a process has died.

    Raises:
        UnavailableError: Some ranks did not connect in time.
        ConfigurationError: This machine does not have the address `host`.
    """
    secret = secrets.token_hex(16)
    connections: dict[int, RankConnection] = {}
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
                    f"tp: ranks {missing} did not connect within {timeout_s:g} s; "
                    "see their output for the reason.",
                    field="tp",
                )
            try:
                sock, _peer = listener.accept()
            except TimeoutError:
                continue
            # Any process may connect. Only a rank of this target has the secret.
            connection = RankConnection(sock)
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


def connect_rank(store: Store, rank: int, timeout_s: float) -> RankConnection:
    """Connect this rank to rank 0. First wait until the ranks' common store contains rank 0's address.

    After a restart of the ranks by torchrun, the store first contains the address of the previous rank 0. The
    function therefore retries until the new rank 0 has replaced this address.

    Raises:
        UnavailableError: Rank 0 cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        host, port, secret = bytes(store.get(ADDRESS_KEY)).decode().split(" ")
        try:
            connection = RankConnection(socket.create_connection((host, int(port)), CONNECT_S))
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
    """Return a section of the ranks' common store that no earlier set of ranks has used.

    The ranks must be connected already. The section is named after the secret that the ranks share, because
    torchrun's counts of restarts may differ between hosts.
    """
    return PrefixStore(bytes(store.get(ADDRESS_KEY)).decode().split(" ")[2], store)


def beat_until_gone(connection: RankConnection, grace_s: float) -> None:
    """Start a thread that sends rank 0 a heartbeat each second, and ends this process when rank 0 is gone.

    A collective whose peer has died never returns. The thread must therefore end the whole process.

    Args:
        connection: The connection to rank 0.
        grace_s: After rank 0 is gone, the thread waits this number of seconds for the process to exit by
            itself.
    """
    threading.Thread(target=_beat, args=(connection, grace_s), name="tp-beat", daemon=True).start()


def _beat(connection: RankConnection, grace_s: float) -> None:
    poller = select.poll()
    poller.register(connection.socket, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
    with contextlib.suppress(OSError, ValueError):  # The connection is closed.
        while not poller.poll(BEAT_S * 1000):
            connection.report(RankReport(ReportKind.BEAT))
    time.sleep(grace_s)
    exit_now(1)


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigurationError(
            f"MASTER_ADDR: rank 0 cannot listen on {host} ({error.strerror or error}); "
            "set it to an address of rank 0's host.",
            field="MASTER_ADDR",
        ) from error


def _close(connections: Mapping[int, RankConnection]) -> None:
    for connection in connections.values():
        connection.close()


def _greeted(greeting: bytes | None, secret: str, size: int) -> int | None:
    """Return the rank from a greeting that contains the secret, else None."""
    said, _, rank = (greeting or b"").decode(errors="replace").partition(" ")
    if (
        not hmac.compare_digest(said.encode(), secret.encode())
        or not rank.isdecimal()
        or not 0 < int(rank) < size
    ):
        return None
    return int(rank)
