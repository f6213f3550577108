"""Reads single keys from the terminal while a program waits, without the user pressing Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

MOST_BYTES = 64


class Keys:
    """Waits, and reads the keys that are pressed meanwhile.

    Args:
        terminal: File descriptor of the terminal. None only waits.
    """

    def __init__(self, terminal: int | None) -> None:
        self._terminal = terminal

    @property
    def are_read(self) -> bool:
        """True if there is a terminal whose keys are read."""
        return self._terminal is not None

    def pressed(self, wanted: str, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` seconds. Return True as soon as a key of `wanted` is pressed."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if self._terminal is None:
                time.sleep(left)
            elif select.select([self._terminal], [], [], left)[0]:
                typed = os.read(self._terminal, MOST_BYTES)
                if not typed:
                    # The terminal is gone.
                    self._terminal = None
                if any(key in wanted for key in typed.decode(errors="replace")):
                    return True
        return False


@contextmanager
def typed_keys() -> Iterator[Keys]:
    """Yield the keys of standard input. If that is no terminal, the keys only wait.

    Until the context ends, the terminal neither echoes keys nor waits for Enter. Ctrl-C still interrupts.
    """
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)
        yield Keys(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
