"""Limit of open files: raises it, and divides it between the connections and the rest of the gateway."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from typing import Any

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
    lines = LimitedLines()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket.accept()" not in str(context.get("message")) or not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif failed := lines.count():
            _log.error("cannot accept connections", error=error.strerror, failed=failed)

    loop.set_exception_handler(handle)


class LimitedLines:
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
