"""Remembers the load of the last two minutes, second by second, for the charts of the operator's page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 120


@dataclass(slots=True)
class _Second:
    """The load of one second.

    Attributes:
        at: The second, counted from the clock's start.
        running: The largest number of sequences that had their first token and had not ended.
        tokens: Number of tokens that the targets sent.
        accepted: Number of draft tokens that were accepted, of the sequences that ended in this second.
        drafted_rounds: Number of these sequences' rounds with a draft.
    """

    at: int
    running: int
    tokens: int = 0
    accepted: int = 0
    drafted_rounds: float = 0.0


class RecentLoad:
    """The load of this gateway's sequences in each of the last `SECONDS` seconds.

    There is no timer and no request to a target: the events of the sequences fill the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._seconds = deque([_Second(int(clock()), 0)], maxlen=SECONDS + 1)

    def began(self) -> None:
        """Count a sequence that has its first token."""
        second = self._now()
        self._running += 1
        second.running = max(second.running, self._running)

    def ended(self) -> None:
        """Stop counting a sequence, however it ended."""
        self._now()
        self._running -= 1

    def add_tokens(self, count: int) -> None:
        """Add tokens that a target has just sent."""
        self._now().tokens += count

    def add_rounds(self, accepted: int, drafted_rounds: float) -> None:
        """Add the draft tokens accepted by a finished sequence, and the number of its rounds with a draft."""
        second = self._now()
        second.accepted += accepted
        second.drafted_rounds += drafted_rounds

    def as_json(self) -> dict[str, list[Any]]:
        """Return lists with one value for each complete second, oldest first, of at most `SECONDS` values.

        `accept_length` is None for a second in which no sequence with drafts ended.
        """
        self._now()
        complete = list(self._seconds)[:-1]
        return {
            "tokens": [one.tokens for one in complete],
            "running": [one.running for one in complete],
            "accept_length": [
                round(1 + one.accepted / one.drafted_rounds, 3) if one.drafted_rounds else None
                for one in complete
            ],
        }

    def throughput(self) -> float:
        """Return the tokens per second of the latest complete second with tokens. 0 if there is none."""
        self._now()
        complete = list(self._seconds)[:-1]
        return float(next((one.tokens for one in reversed(complete) if one.tokens), 0))

    def _now(self) -> _Second:
        """Return the current second, after adding the seconds without events since the latest one."""
        at = int(self._clock())
        latest = self._seconds[-1]
        if latest.at < at:
            for one in range(max(latest.at + 1, at - SECONDS), at + 1):
                self._seconds.append(_Second(one, self._running))
            latest = self._seconds[-1]
        return latest
