"""Stop strings: found as soon as they are complete, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What may be done with a buffer of text.

    Attributes:
        release: Characters from its start that are final.
        matched: The stop string that ended the text, if one did; the rest of the buffer is then dropped.
    """

    release: int
    matched: str | None = None


class StopMatcher:
    """Looks for stop strings in text that has not been released yet. Released text can be part of no match, by construction."""

    def __init__(self, stops: Sequence[str], include_match: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_match = include_match

    def scan(self, buffer: str) -> Scan:
        """Return how much of `buffer` (all unreleased text) is final, and whether a stop string ends it there.

        Of several matches the one that starts first counts, of those at one place the shortest: it was complete first.
        """
        found = [(start, len(stop), stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            start, length, stop = min(found)
            return Scan(start + length if self._include_match else start, stop)
        return Scan(len(buffer) - max((_overlap(buffer, stop) for stop in self._stops), default=0))


def _overlap(buffer: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that ends `buffer`."""
    for length in range(min(len(stop) - 1, len(buffer)), 0, -1):
        if buffer.endswith(stop[:length]):
            return length
    return 0
