"""Reads the lines of a chat: an editor with history on a terminal, plain lines from a pipe."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

MOST_BYTES = 65536


def typed_lines(commands: list[str]) -> Iterator[str]:
    """Yield the lines that the user types, until Ctrl-D. A pasted text with line breaks is one line.

    Ctrl-C clears the line. Lines that were typed while no editor was open, for example during an answer, come
    first.

    Args:
        commands: Words to complete at the start of a line.
    """
    history = _history()
    session: PromptSession[str] = PromptSession(
        history=history,
        multiline=True,
        key_bindings=_keys(),
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        prompt_continuation="  ",
    )
    while True:
        try:
            while is_line_waiting(sys.stdin.fileno()):
                line = os.read(sys.stdin.fileno(), MOST_BYTES).decode(errors="replace")
                if not line:
                    return
                print(f"> {line}", end="" if line.endswith("\n") else "\n")
                if text := line.removesuffix("\n"):
                    history.append_string(text)
                    yield text
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def is_line_waiting(terminal: int) -> bool:
    """Return True if the terminal has a complete line that was typed while no editor was open.

    The editor would take the end of such a line for Ctrl-J, because the terminal has changed Enter into it.
    """
    return bool(select.select([terminal], [], [], 0)[0])


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input."""
    for line in sys.stdin:
        yield line.rstrip("\n")


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Return the history in a file that only this user can read. Use memory if the file cannot be written."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "outrider" / "chat-history"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        return FileHistory(str(file))
    return InMemoryHistory()
