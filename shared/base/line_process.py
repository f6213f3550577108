"""A child process that answers each line of its input with one line, within limits of time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20


class NoReplyError(Exception):
    """The process has not replied. End it with `kill`, because a late reply would answer the wrong line.

    Attributes:
        late: Whether the process took too long. Otherwise, it has ended or sent too much.
    """

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late


class LineProcess:
    """A child process, for use on one thread. It is killed at the latest when this object is deleted.

    Args:
        command: The program and its arguments.
        max_line_bytes: Largest size of a reply.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, command: Sequence[str], max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.kill = weakref.finalize(self, _kill, self._process)
        """Kill the process."""

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.kill.alive and self._process.poll() is None

    def interrupt(self) -> None:
        """Kill the process from another thread. The thread that waits for a reply gets a NoReplyError."""
        self._process.kill()

    def send(self, line: bytes) -> None:
        """Send one line, which ends with a line break.

        Raises:
            NoReplyError: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NoReplyError(late=False) from None

    def read(self, limit_s: float) -> bytes:
        """Return the next line that the process writes.

        Args:
            limit_s: Longest wait for the complete line, in seconds.

        Raises:
            NoReplyError: The process takes longer, has ended, or writes a longer line than allowed.
        """
        assert self._process.stdout is not None
        due = time.monotonic() + limit_s
        line, self._buffer = self._buffer, bytearray()
        output = self._process.stdout.fileno()
        # Unlike `select`, `poll` accepts descriptors above 1023.
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while (end := line.find(b"\n", max(0, len(line) - READ_BYTES))) < 0:
            left = due - time.monotonic()
            if left <= 0 or not poll.poll(left * 1e3):
                raise NoReplyError(late=True)
            part = os.read(output, READ_BYTES)
            if not part or len(line) + len(part) > self._max_line_bytes:
                raise NoReplyError(late=False)
            line += part
        self._buffer = line[end + 1 :]
        return bytes(line[:end])


def limit_memory(more_bytes: int) -> None:
    """Limit the address space of this process to its present size and `more_bytes`. The child calls this."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
