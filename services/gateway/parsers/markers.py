"""Finds marker strings in a stream of text, and holds back text that may become a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """Result of a search.

    Attributes:
        before: Text that is certainly no part of a marker.
        marker: The marker that follows `before`, or None if no marker is complete.
        rest: The text after the marker. If there is no marker, text that may become a marker.
    """

    before: str
    marker: str | None
    rest: str


def split_at_marker(buffer: str, markers: Sequence[str]) -> Split:
    """Split `buffer` at the first marker. No marker may be the start of another one."""
    found = [(at, marker) for marker in markers if (at := buffer.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return Split(buffer[:at], marker, buffer[at + len(marker) :])
    keep = len(buffer) - max((_overlap(buffer, marker) for marker in markers), default=0)
    return Split(buffer[:keep], None, buffer[keep:])


def _overlap(buffer: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` at the end of `buffer`."""
    for length in range(min(len(marker) - 1, len(buffer)), 0, -1):
        if buffer.endswith(marker[:length]):
            return length
    return 0


class TextWriter:
    """Holds back white space at the end of text. White space around tool calls is not part of the text."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def add(self, text: str) -> str:
        """Return the text that is final once `text` has been added."""
        whole = self._space + text
        if self._after_call:
            whole = whole.lstrip()
            self._after_call = not whole
        final = whole.rstrip()
        self._space = whole[len(final) :]
        return final

    def call(self) -> None:
        """Note that a tool call follows: drop the white space before and after the call."""
        self._space = ""
        self._after_call = True

    def finish(self) -> str:
        """Return the white space that is still held back."""
        rest, self._space = self._space, ""
        return rest
