"""Decides when start-up stops waiting for a draft service: sooner if nothing listens at its address.

A draft service listens on its socket as soon as its weights are loaded. It answers as soon as it is warmed
up. Start-up therefore waits longer for a draft that already listens. A draft that does not listen may never
start.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from outrider.shared.rpc.address import grpc_address

ABSENT_S = 20.0
"""Seconds after which start-up stops waiting for a draft that does not listen.

Target and draft may start together, and the draft may take longer to load than the target.
"""
LOOK_S = 1.0
CONNECT_S = 0.25


class Reachability:
    """Decides when start-up stops waiting for a draft service that does not listen at its address.

    Args:
        address: The draft service's address. None if there is no address to connect to.
        now: Returns the time of a monotonic clock, in seconds.
    """

    def __init__(self, address: str | None, now: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._now = now
        self._since: float | None = None
        self._looked = -LOOK_S
        self._listens = False

    def is_long(self) -> bool:
        """Return True if nothing listens now, `ABSENT_S` seconds or more after this method's first call.

        This method tries to connect to the draft service's address at most once per `LOOK_S` seconds.
        """
        now = self._now()
        if self._since is None:
            self._since = now
        if now - self._since < ABSENT_S:
            return False
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._listens = self._address is not None and listens(self._address)
        return not self._listens


def listens(address: str) -> bool:
    """Return True if a socket accepts connections at a draft's address.

    Args:
        address: ``host:port``, ``unix:/path`` or ``ipc:///path``.
    """
    where = grpc_address(address, "draft")
    try:
        if where.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_S)
                probe.connect(where.removeprefix("unix:"))
        else:
            host, _, port = where.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True
