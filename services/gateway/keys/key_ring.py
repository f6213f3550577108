"""All API keys of the gateway: finds the caller of a request, and reloads the keys file when it changes."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.services.gateway.keys.caller import Caller
from outrider.services.gateway.keys.entry import KeyEntry, digest_of
from outrider.services.gateway.keys.key_metrics import KeyMetrics
from outrider.services.gateway.keys.keys_file import read_keys_file, refuse_duplicates
from outrider.shared.base.errors import ConfigurationError, ErrorCode, OutriderError
from outrider.shared.obs.logging import get_logger

NEEDS_KEY = "This server needs an API key. Send it as: Authorization: Bearer KEY."
_log = get_logger("outrider.gateway.keys")
Stamp = tuple[int, int, int, int, int]
"""Identifies one version of a file: change times of content and metadata, inode, size and mode."""


class KeyRing:
    """The callers of all keys. If there are no keys, requests need no authentication.

    Use the object on the event loop only.
    """

    def __init__(
        self,
        fixed: Sequence[KeyEntry],
        file: Path | None,
        clock: Callable[[], float],
        metrics: KeyMetrics,
    ) -> None:
        """Read the keys.

        Args:
            fixed: Keys that do not change while the gateway runs.
            file: The keys file, or None.
            clock: Returns the time in seconds, for the limits per minute.
            metrics: The metrics in which callers count their requests and tokens.

        Raises:
            ConfigurationError: If the file is not valid, or two keys have the same name.
        """
        self._fixed = tuple(fixed)
        self._file = file
        self._clock = clock
        self._metrics = metrics
        self._stamp = None if file is None else _stamp(file)
        self._callers: dict[str, Caller] = {}
        self._replace(self._entries())

    @property
    def guarded(self) -> bool:
        """Whether requests need a key."""
        return bool(self._callers)

    def identify(self, authorization: str | None) -> Caller | None:
        """Return the caller that owns the API key in an Authorization header.

        The result is None if the gateway has no keys. The digest of the header's key is compared with the
        digest of every known key, in constant time. The response time therefore reveals nothing about the
        known keys.

        Raises:
            OutriderError: UNAUTHENTICATED, unless the header contains one of the keys. A missing key and a
                wrong key have different messages.
        """
        if not self._callers:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        digest = digest_of(token.strip())
        matches = [
            caller for caller in self._callers.values() if hmac.compare_digest(digest, caller.entry.digest)
        ]
        if scheme.lower() != "bearer" or not matches:
            sent = scheme.lower() == "bearer" and token.strip()
            message = "This key is not valid. Send one of this server's API keys." if sent else NEEDS_KEY
            raise OutriderError(message, code=ErrorCode.UNAUTHENTICATED, reason="invalid_api_key")
        return matches[0]

    def reload_if_changed(self) -> bool:
        """Read the file of API keys again if it has changed. If the file is invalid, keep the old keys.

        Returns:
            True if the keys were replaced.
        """
        if self._file is None or (stamp := _stamp(self._file)) == self._stamp:
            return False
        self._stamp = stamp
        try:
            entries = self._entries()
        except ConfigurationError as error:
            self._metrics.file_ok.set(0)
            _log.error("keys file is not valid; the old keys stay", error=error.message)
            return False
        self._replace(entries)
        self._metrics.file_ok.set(1)
        _log.info("keys file reloaded", keys=len(entries))
        return True

    def _entries(self) -> tuple[KeyEntry, ...]:
        entries = (*self._fixed, *(read_keys_file(self._file) if self._file is not None else ()))
        refuse_duplicates(entries, str(self._file))
        return entries

    def _replace(self, entries: Sequence[KeyEntry]) -> None:
        callers: dict[str, Caller] = {}
        for entry in entries:
            if (caller := self._callers.get(entry.name)) is None:
                caller = Caller(entry, self._clock, self._metrics)
            else:
                caller.update(entry)
            callers[entry.name] = caller
        self._callers = callers


def _stamp(file: Path) -> Stamp | None:
    """Return the version of a file, or None if the file's metadata cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    # The mode and the owner decide whether the file may be used, so `chmod` and `chown` must cause a reload.
    # Two changes within one tick of the file system's clock have the same time, so the mode is compared, too.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size, found.st_mode
