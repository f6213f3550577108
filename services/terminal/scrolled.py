"""Shows the part of a long text that fits on the screen, above a footer that is always visible."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

LINE_KEYS = {"up": -1, "k": -1, "down": 1, "j": 1}
PAGE_KEYS = {"page up": -1, "b": -1, "page down": 1, " ": 1}


class Scrolled:
    """A long content of which the screen shows as many lines as fit, and a footer below it.

    Args:
        quits: The end of the footer, which says how to leave the program.
        can_scroll: True if keys are read, so that the footer may name those that scroll.
    """

    def __init__(self, quits: str, can_scroll: bool) -> None:
        self.content: RenderableType = ""
        self.message: str | None = None
        self._quits = quits
        self._can_scroll = can_scroll
        self._first = 0
        self._height = 1
        self._total = 0

    def press(self, key: str) -> None:
        """Scroll, if the key is one of the keys for it. The next rendering shows the result."""
        if key in LINE_KEYS:
            self._first += LINE_KEYS[key]
        elif key in PAGE_KEYS:
            self._first += PAGE_KEYS[key] * max(1, self._height - 1)
        elif key == "home":
            self._first = 0
        elif key == "end":
            self._first = self._total

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        message = Text(self.message or "", "bold red")
        footer_size = 1 + len(console.render_lines(message, options.update(height=None))) * bool(self.message)
        self._height = max(1, (options.height or console.height) - footer_size)
        lines = console.render_lines(self.content, options.update(height=None))
        self._total = len(lines)
        self._first = max(0, min(self._first, self._total - self._height))
        shown = lines[self._first : self._first + self._height]
        for line in shown:
            yield from line
            yield Segment.line()
        # Empty lines keep the footer on the last line of the screen.
        for _ in range(self._height - len(shown)):
            yield Segment.line()
        hint = Text(self._hint(len(shown)), "dim", no_wrap=True, overflow="ellipsis")
        yield Group(message, hint) if self.message else hint

    def _hint(self, num_shown: int) -> str:
        if num_shown >= self._total or not self._can_scroll:
            return self._quits
        lines = f"lines {self._first + 1}–{self._first + num_shown} of {self._total}"
        return f"{self._quits}   ↑ ↓ Page Up Page Down scroll   {lines}"
