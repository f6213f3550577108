"""Standby processes: spare processes that have imported a service's code and can replace a failed process.

Importing torch takes seconds. A standby process does this ahead of time, but neither loads a model nor uses a
GPU. The supervisor writes these commands to the standard input of the standby process:

    PREPARE    import the service's code
    SERVE      load the model and serve

The standby process exits at the end of its standard input, because the supervisor is then gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable

VARIABLE = "OUTRIDER_STANDBY"
"""Environment variable of a standby process."""
PREPARE, SERVE = "prepare", "serve"


class Standby:
    """The supervisor's end of one standby process.

    Args:
        process: The process, started with `VARIABLE` and a pipe as its standard input.

    Attributes:
        output: What the process has printed, if it ended before it could take over.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.output = ""
        self._process = process
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self) -> None:
        """Order the process to import its code. May be called from any thread, and repeatedly."""
        self._tell(PREPARE)

    def take_over(self) -> subprocess.Popen[str] | None:
        """Order the process to serve, and return the process. Return None if the process has ended."""
        self._tell(SERVE, last=True)
        if self._process.poll() is None:
            return self._process
        assert self._process.stdout is not None
        self.output = self._process.stdout.read()
        self._reap()
        return None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process. None while the process runs."""
        return self._process.poll()

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        with self._lock:
            self._close()
        self._process.kill()
        self._reap()

    def _reap(self) -> None:
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tell(self, line: str, *, last: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # OSError means that the process has ended
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            if last:
                self._close()

    def _close(self) -> None:
        self._closed = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def wait_until_needed(load: Callable[[], object]) -> None:
    """In a standby process, wait for the supervisor. In any other process, do nothing.

    Exits this process if the supervisor ends first.

    Args:
        load: Function that imports the service's code.
    """
    if os.environ.pop(VARIABLE, "") != "1":
        return
    loaded = False
    for line in iter(sys.stdin.readline, ""):
        if not loaded:
            load()
            loaded = True
        if line.strip() == SERVE:
            break
    else:
        sys.exit(0)
    # A process with a pipe as its standard input is a standby process.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
