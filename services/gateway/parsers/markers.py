"""Finds marker strings in a stream of text, and holds back text that may become a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MarkerSplit:
    """Result of a search for markers, such as the tags around reasoning, in a model's text.

    Attributes:
        before: Text that is certainly not a part of a marker.
        marker: The marker that follows `before`. None if the searched text contains no complete marker.
        rest: The text after the marker. If there is no marker, the text after `before`, because this text may
            be the start of a marker.
    """

    before: str
    marker: str | None
    rest: str


def split_at_marker(buffer: str, markers: Sequence[str]) -> MarkerSplit:
    """Split `buffer` at the first marker. No marker may be a prefix of another marker."""
    found = [(at, marker) for marker in markers if (at := buffer.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return MarkerSplit(buffer[:at], marker, buffer[at + len(marker) :])
    keep = len(buffer) - max((_overlap(buffer, marker) for marker in markers), default=0)
    return MarkerSplit(buffer[:keep], None, buffer[keep:])


def _overlap(buffer: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` with which `buffer` ends."""
    for length in range(min(len(marker) - 1, len(buffer)), 0, -1):
        if buffer.endswith(marker[:length]):
            return length
    return 0


class TextWriter:
    """Holds back white space at the end of text, because white space around tool calls is dropped."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def add(self, text: str) -> str:
        """Add `text`, and return the text that is now final."""
        whole = self._space + text
        if self._after_call:
            whole = whole.lstrip()
            self._after_call = not whole
        final = whole.rstrip()
        self._space = whole[len(final) :]
        return final

    def call(self) -> None:
        """Note that a tool call follows. Drop the white space before the call and after it."""
        self._space = ""
        self._after_call = True

    def finish(self) -> str:
        """Return the white space that is still held back."""
        rest, self._space = self._space, ""
        return rest
