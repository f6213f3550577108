"""Decides when start-up stops waiting for a draft: sooner if nothing listens at its address.

A draft's socket listens once its weights are loaded. The draft answers once it is warmed up. Start-up
therefore waits longer for a draft that listens, which is about to be ready, than for one that may never come.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from outrider.shared.rpc.address import grpc_address

ABSENT_S = 20.0
"""Grace period in which a draft need not listen: target and draft start together, and one may load longer."""
LOOK_S = 1.0
CONNECT_S = 0.25


class Reachability:
    """Decides when to give up a draft that does not listen.

    Args:
        address: The draft's address; None if there is no address to try.
        now: Returns monotonic seconds.
    """

    def __init__(self, address: str | None, now: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._now = now
        self._since: float | None = None
        self._looked = -LOOK_S
        self._listens = False

    def is_long(self) -> bool:
        """Return True if nothing listens and `ABSENT_S` have passed since the first call.

        Connects at most once per `LOOK_S`.
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
