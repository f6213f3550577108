"""Finds a stop string in generated text as soon as it is complete.

Text that may begin a match is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of searching a buffer of text for stop strings.

    Attributes:
        release: Number of characters at the start of the buffer that are final.
        matched: The stop string that ends the text, or None. After a match, drop the rest of the buffer.
    """

    release: int
    matched: str | None = None


class StopMatcher:
    """Finds stop strings in unreleased text. Text that may be the beginning of a match is not released."""

    def __init__(self, stops: Sequence[str], include_match: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_match = include_match

    def scan(self, buffer: str) -> Scan:
        """Return how many characters of `buffer` may be released, and the stop string that was found, if any.

        `buffer` contains all text that has not been released yet. The match that starts first wins. If
        several matches start at the same character, the shortest match wins, because it was complete first.
        """
        found = [(start, len(stop), stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            start, length, stop = min(found)
            return Scan(start + length if self._include_match else start, stop)
        return Scan(self.releasable(buffer))

    def releasable(self, buffer: str) -> int:
        """Return the number of characters in `buffer` before a partial match at its end.

        Without a partial match, this is the length of `buffer`.
        """
        return len(buffer) - max((_overlap(buffer, stop) for stop in self._stops), default=0)


def _overlap(buffer: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `buffer` ends."""
    for length in range(min(len(stop) - 1, len(buffer)), 0, -1):
        if buffer.endswith(stop[:length]):
            return length
    return 0
