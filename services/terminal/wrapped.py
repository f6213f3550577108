"""Prints a stream of styled text without breaking words at the edge of the terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


class WrappedPrinter:
    """Prints pieces as they arrive. A word is held back until its end is known, so that it can be wrapped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._word: list[tuple[str, str]] = []

    def add(self, text: str, style: str) -> None:
        """Add a piece of text."""
        start = 0
        for at, char in enumerate(text):
            if not char.isspace():
                continue
            self._hold(text[start:at], style)
            self._print_word()
            self._print_space(char)
            start = at + 1
        self._hold(text[start:], style)

    def finish(self) -> None:
        """Print the text that is held back, and end the line."""
        self._print_word()
        self._console.print()
        self._column = 0

    def _hold(self, text: str, style: str) -> None:
        if text:
            self._word.append((text, style))

    def _print_word(self) -> None:
        if not self._word:
            return
        width = sum(cell_len(text) for text, _ in self._word)
        if self._column and self._column + width > self._console.width:
            self._write(Text("\n"))
            self._column = 0
        self._write(Text.assemble(*self._word))
        self._column = (self._column + width) % self._console.width
        self._word = []

    def _print_space(self, char: str) -> None:
        if char == "\n":
            self._write(Text("\n"))
            self._column = 0
        elif self._column < self._console.width - 1:
            self._write(Text(" "))
            self._column += 1

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True, highlight=False)
        self._console.file.flush()
