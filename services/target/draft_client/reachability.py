"""Whether a draft is away altogether: a start waits longer for one that listens, which is at its own start, than for one that may never
come. A draft's socket listens from when its weights are loaded; it answers once it is warmed up."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from outrider.shared.rpc.address import grpc_address

ABSENT_S = 20.0
"""For so long a draft may not even listen: target and draft are started together, and one may load longer than the other."""
LOOK_S = 1.0
CONNECT_S = 0.25


class Reachability:
    """Says when to give up a draft that does not listen.

    Args:
        address: Of the draft; None: there is nothing that could listen.
        now: Monotonic seconds.
    """

    def __init__(self, address: str | None, now: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._now = now
        self._since: float | None = None
        self._looked = -LOOK_S
        self._listens = False

    def is_long(self) -> bool:
        """Whether nothing listens now, `ABSENT_S` after this was asked first. Looks at most every `LOOK_S`."""
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
    """Whether anything takes connections at the address of a draft (``host:port``, ``unix:/path`` or ``ipc:///path``)."""
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
