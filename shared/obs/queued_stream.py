"""Writes log lines on another thread, so that a full disk or an unread pipe cannot block a service."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, NoReturn, TextIO

MAX_QUEUED_CHARS = 4 * 1024 * 1024
"""Largest number of queued characters while nothing reads the log. Further lines are dropped and counted."""
EXIT_DRAIN_S = 1.0
"""Longest time to wait at the end of the process until the queued text is read."""
MAX_WRITE_BYTES = 64 * 1024
DROPPED = "log lines were dropped because the log could not be written"


class QueuedStream(io.TextIOBase):
    """A text stream whose `write` never blocks and never raises.

    A separate thread writes the text to the underlying stream. While the underlying stream blocks, up to
    `max_chars` characters are queued, and further text is dropped. Text that cannot be written, for example
    because the disk is full, is dropped too. A line in the output reports how many lines are missing. A line
    that was written in part is completed before any other text.

    Args:
        behind: The underlying stream.
        max_chars: Largest number of characters to queue.
        json_service: If given, report missing lines as JSON objects with this name in ``service``. Otherwise,
            report them as text.
    """

    def __init__(
        self, behind: TextIO, max_chars: int = MAX_QUEUED_CHARS, json_service: str | None = None
    ) -> None:
        self.json_service = json_service
        self._behind = behind
        self._max_chars = max_chars
        self._descriptor = _descriptor(behind)
        self._changed = threading.Condition()
        self._texts: deque[str] = deque()
        self._chars = 0
        self._missing = 0
        self._mid_line = False  # whether the output ends within a line
        self._rest = b""  # the part of that line that could not be written
        self._writing = False
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the underlying stream."""
        return self._behind.encoding or "utf-8"

    @property
    def dropped_lines(self) -> int:
        """Number of lines that were dropped and that the output has not reported yet."""
        return self._missing

    def write(self, text: str) -> int:
        """Queue text. Return its length."""
        with self._changed:
            if self._chars + len(text) > self._max_chars:
                self._missing += text.count("\n")
                return len(text)
            self._texts.append(text)
            self._chars += len(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_texts, name="log-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes without delay."""

    def drain(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until all text is written. Return True if all text is written."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._texts and not self._writing, max(0.0, deadline - time.monotonic())
            )

    def isatty(self) -> bool:
        """Return True if the underlying stream is a terminal."""
        return self._behind.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the underlying stream."""
        return self._behind.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def _write_texts(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._texts))
                missing, self._missing = self._missing, 0
                text = "".join(self._texts)
                self._texts.clear()
                self._writing = True
            lost = self._write_lines(text, missing)
            with self._changed:
                # Text counts as queued until it is written, so at most twice `max_chars` characters are in
                # memory.
                self._chars = sum(map(len, self._texts))
                self._missing += lost
                self._writing = False
                self._changed.notify_all()

    def _write_lines(self, text: str, missing: int) -> int:
        """Write the rest of the last line, the number of missing lines, and `text`.

        Returns:
            The number of missing lines that the output still has to report.
        """
        head = self._rest
        if missing and self._mid_line and not head.endswith(b"\n"):
            head += b"\n"
        notice = self._notice(missing).encode() if missing else b""
        data = head + notice + text.encode(self.encoding, "backslashreplace")
        written = self._write_out(data)
        if written:
            self._mid_line = data[written - 1 : written] != b"\n"
        # Keep the end of a line that was written in part. Otherwise, the next line would continue it.
        end = data.find(b"\n", written) + 1 or len(data)
        kept = end if self._mid_line and written < len(data) else written
        self._rest = data[written:kept]
        reported = len(head) + len(notice)
        lost = data.count(b"\n", max(kept, reported))
        return lost if kept >= reported else lost + missing

    def _notice(self, missing: int) -> str:
        if self.json_service is None:
            return f"({missing} {DROPPED})\n"
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        names = {"service": self.json_service, "logger": "outrider.log", "level": "warning"}
        return json.dumps({"event": DROPPED, "lines": missing, **names, "timestamp": now}) + "\n"

    def _write_out(self, data: bytes) -> int:
        """Write as much as possible, and return the number of written bytes."""
        written = 0
        # If writing fails, the service continues without this part of its log.
        with contextlib.suppress(Exception):
            if self._descriptor is None:
                self._behind.write(data.decode(self.encoding))
                self._behind.flush()
                return len(data)
            # Do not use the stream's own buffer, because it would keep text that could not be written.
            view = memoryview(data)
            while written < len(data):
                try:
                    written += os.write(self._descriptor, view[written : written + MAX_WRITE_BYTES])
                except BlockingIOError:
                    select.select([], [self._descriptor], [])
        return written


def queue_stderr(json_service: str | None = None) -> None:
    """Replace `sys.stderr` by a `QueuedStream`. Do nothing if other code has already replaced `sys.stderr`.

    At the end of the process, the text that is still queued is written.

    Args:
        json_service: See `QueuedStream`.
    """
    if sys.__stderr__ is None or sys.stderr is not sys.__stderr__:
        return
    queued = QueuedStream(sys.__stderr__, json_service=json_service)
    sys.stderr = queued
    atexit.register(queued.drain, EXIT_DRAIN_S)


def exit_now(code: int) -> NoReturn:
    """End this process like `os._exit`, but first write the text that is still queued for `sys.stderr`."""
    if isinstance(sys.stderr, QueuedStream):
        sys.stderr.drain(EXIT_DRAIN_S)
    os._exit(code)


def _descriptor(stream: Any) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return int(stream.fileno())
    return None
