"""Reads single keys from the terminal without the Enter key, and hides control keys during an answer."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

MOST_BYTES = 64
LOCAL_FLAGS = 3
"""Index of a terminal's local flags in the attributes of `termios`."""
SEQUENCE = re.compile(r"\x1b(?:\[[0-9;]*|O)[A-Za-z~]|.", re.DOTALL)
"""One key: the escape sequence of a special key, or one character."""
NAMES = {
    "A": "up",
    "B": "down",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "page up",
    "6~": "page down",
    "7~": "home",
    "8~": "end",
}
"""Names of special keys, by the end of their escape sequence."""


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

    def pressed(self, timeout_s: float) -> list[str]:
        """Wait for keys for at most `timeout_s` seconds, and return them as soon as there are any.

        Each key is its character, or the name of a special key: ``up``, ``down``, ``page up``, ``page down``,
        ``home`` or ``end``. The list is empty if no key is pressed.
        """
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if self._terminal is None:
                time.sleep(left)
            elif select.select([self._terminal], [], [], left)[0]:
                typed = os.read(self._terminal, MOST_BYTES)
                if typed:
                    return key_names(typed.decode(errors="replace"))
                # The terminal is gone.
                self._terminal = None
        return []


def key_names(typed: str) -> list[str]:
    """Return the keys in what a terminal sent, with names for the special keys."""
    return [NAMES.get(key[2:], key) if len(key) > 2 else key for key in SEQUENCE.findall(typed)]


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


@contextmanager
def hidden_control_keys() -> Iterator[None]:
    """Hide control keys such as Ctrl-C, which the terminal would print as ``^C`` into the output.

    Other typed text stays visible. If standard input is no terminal, nothing changes.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    hidden = before.copy()
    hidden[LOCAL_FLAGS] &= ~termios.ECHOCTL
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, hidden)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
