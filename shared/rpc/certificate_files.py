"""Reads the files of certificates again when they have changed, so that a renewal needs no restart."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.obs.logging import get_logger

CHECK_S = 1.0
"""Seconds between two looks at the files."""

_log = get_logger("outrider.certificates")


@dataclass(frozen=True, slots=True)
class Certificates:
    """The contents of the files, in PEM format. `ca` is empty if there is no authority."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(default=b"", repr=False)


class CertificateFiles:
    """The files that contain a server's certificates and key. Thread-safe.

    Args:
        paths: Paths of the files.
        read: Reads the files and checks them. Raises ConfigurationError if they are not valid.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], Certificates],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_at = clock()
        self._stamps = self._look()
        self._latest: Certificates | None = None

    def latest(self) -> Certificates | None:
        """Read the files and return their contents. While these are not valid, return the last valid ones.

        The result is None if no earlier call has found valid contents. This method does not affect `changed`.
        """
        with self._lock:
            try:
                self._latest = self._read()
            except ConfigurationError as error:
                _log.error("certificates are not valid; the old ones stay", error=error.message)
            return self._latest

    def changed(self) -> Certificates | None:
        """Return the new certificates if the files have changed since the last call. Otherwise, return None.

        The old certificates stay in use while the new files are not valid, for example because only one file
        has been replaced. The files are checked at most once a second.
        """
        with self._lock:
            now = self._clock()
            if now - self._checked_at < CHECK_S:
                return None
            self._checked_at = now
            stamps = self._look()
            if stamps == self._stamps:
                return None
            self._stamps = stamps
            try:
                found = self._read()
            except ConfigurationError as error:
                _log.error("certificates are not valid; the old ones stay", error=error.message)
                return None
        _log.info("certificates reloaded", file=str(self._paths[0]))
        return found

    def _look(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what identifies one version of a file, or None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
