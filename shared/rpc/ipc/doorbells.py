"""Doorbells: words in shared memory that signal the progress of rounds, and a watchdog that limits waits.

In every round, the target sends the state of its batch and the draft replies with trees
(`shared.spec.resident`). A word is a 32-bit integer that contains the number of a round. The number in a word
only increases. A side's wait for round n ends when the peer's word is at least n. The watchdog limits every
wait.

    word            writer                               meaning
    STATE           the target, after writing the slot   the state of round n is in slot n % 2
    TREES           the draft, after writing the slot    the trees of round n are in slot n % 2
    TARGET_PASSED   the target, after its wait           the target's wait for trees n is over
    DRAFT_PASSED    the draft, after its wait            the draft's wait for state n is over

One round in time order:

    target's stream                           draft's stream
    write state n to slot n % 2
    STATE = n                          →      wait until STATE ≥ n
    wait until TREES ≥ n                      DRAFT_PASSED = n, copy the state
                                              draft, write trees n to slot n % 2
                                       ←      TREES = n
    TARGET_PASSED = n, copy the trees

If the limit has passed or the peer is gone, the watchdog of the waiting side writes the peer's word. This
ends the wait. The slot then still contains the state or trees of an earlier round. The waiting side detects
this by the round's number in the header of the slot. The round then continues without the peer's data.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from outrider.shared.rpc.ipc.slots import SharedMemory

TICK_S, LONGEST_TICK_S = 0.002, 0.05
"""Shortest and longest interval of the watchdog's checks.

Each check takes the GIL from a thread that launches rounds.
"""
TICKS_A_LIMIT = 8
"""Number of checks within the limit of a wait, unless `TICK_S` or `LONGEST_TICK_S` bounds the interval.

One check detects that a wait has begun, and a later check detects that it has lasted too long. Each check may
be one interval late. A wait therefore ends at most two intervals late. Two intervals are a quarter of the
wait's limit, but at least 4 ms and at most 0.1 s.
"""


class Word(IntEnum):
    """Byte offsets of the words in the first page of the shared memory. Each word has its own cache line."""

    STATE = 0
    TREES = 64
    TARGET_PASSED = 128
    DRAFT_PASSED = 192


class Side(Enum):
    """The two sides of a connection: target and draft."""

    TARGET = "target"
    DRAFT = "draft"


class Doorbells:
    """One side's view of the doorbells: words in shared memory that signal the progress of rounds.

    Any thread may call `release` and read the properties.

    Args:
        memory: Shared memory whose first page contains the words.
        side: The side of this process.

    Attributes:
        given_at: Byte offset of the word that announces this side's state or trees.
        awaited_at: Byte offset of the peer's word for which this side waits.
        passed_at: Byte offset of the word that shows which waits of this side are over.
    """

    def __init__(self, memory: SharedMemory, side: Side) -> None:
        self.memory = memory
        self.side = side
        target = side is Side.TARGET
        self.given_at, self.awaited_at = (Word.STATE, Word.TREES) if target else (Word.TREES, Word.STATE)
        self.passed_at = Word.TARGET_PASSED if target else Word.DRAFT_PASSED
        # Each access is one load or store of four bytes, so a half-written word is never seen.
        self._given, self._awaited, self._passed = (
            ctypes.c_uint32.from_buffer(memory.bytes, offset)
            for offset in (self.given_at, self.awaited_at, self.passed_at)
        )

    @property
    def given(self) -> int:
        """Last round for which this side announced a blob."""
        return self._given.value

    @property
    def awaited(self) -> int:
        """Last round for which the peer announced a blob, or for which `release` ended the wait."""
        return self._awaited.value

    @property
    def passed(self) -> int:
        """Last round for which this side's wait is over."""
        return self._passed.value

    def give(self, number: int) -> None:
        """Announce from the host that this side's blob of a round is in its slot."""
        self._given.value = number

    def release(self, number: int) -> None:
        """End the wait for a round, and all earlier waits."""
        self._awaited.value = number

    def begun(self, number: int) -> bool:
        """Return True if this side's stream has begun to wait for a round.

        `number` must be the first round for which this side's wait is not over.

        The target's stream begins to wait for the trees of a round when it announces the round's state. The
        draft's stream always counts as waiting.
        """
        return self.side is Side.DRAFT or self.given >= number


@dataclass(slots=True)
class _Wait:
    number: int
    limit_s: float
    since: float | None = None


class DoorbellWatchdog:
    """Watchdog of GPU streams that wait for the peer process: ends the waits that last too long.

    The watchdog has its own thread, because the host's other threads may be waiting for the device.

    Args:
        words: This side's view of the words for which streams wait.
        clock: Returns monotonic seconds.

    Attributes:
        broken: True if the peer was late or gone: the watchdog has ended a wait since the last successful
            `mend`.
    """

    def __init__(self, words: Doorbells, clock: Callable[[], float] = time.monotonic) -> None:
        self.broken = False
        self._words = words
        self._clock = clock
        self._waits: deque[_Wait] = deque()
        self._closed = False
        # How long the thread sleeps before its next check.
        self._tick_s = TICK_S
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def expect(self, number: int, limit_s: float) -> None:
        """Watch a wait that the caller enqueues next."""
        with self._changed:
            self._waits.append(_Wait(number, limit_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="round-watch", daemon=True)
                self._thread.start()
            if len(self._waits) == 1 or _tick_s(limit_s) < self._tick_s:
                self._changed.notify()

    @property
    def waiting(self) -> bool:
        """Whether any watched wait is still running."""
        with self._changed:
            self._drop_passed()
            return bool(self._waits)

    def mend(self) -> bool:
        """Reset `broken` once all waits are over. Return False while a wait is still running."""
        with self._changed:
            self._drop_passed()
            if self._waits:
                return False
            self.broken = self._closed
            return True

    def close(self) -> None:
        """Release all current and future waits. The watchdog's thread ends once all waits are over."""
        with self._changed:
            self._closed = self.broken = True
            if self._waits:
                self._words.release(self._waits[-1].number)
            self._changed.notify()

    def look(self) -> None:
        """End all waits if the oldest has lasted too long, or if any wait was ended since the last `mend`."""
        with self._changed:
            self._drop_passed()
            if not self._waits:
                return
            first = self._waits[0]
            if not self.broken and self._words.awaited < first.number and self._words.begun(first.number):
                now = self._clock()
                first.since = first.since or now
                self.broken = now - first.since > first.limit_s
            if self.broken:
                # Repeat the release on every check, because a late peer may write a lower number to the word
                # at any time.
                self._words.release(self._waits[-1].number)

    def _drop_passed(self) -> None:
        while self._waits and self._words.passed >= self._waits[0].number:
            self._waits.popleft()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waits and not self._closed:
                    self._changed.wait()
                if not self._waits:
                    self._thread = None
                    return
            self.look()
            with self._changed:
                # After a release, every check must repeat it (see `look`), so use the shortest interval.
                self._tick_s = (
                    TICK_S
                    if self.broken
                    else min((_tick_s(wait.limit_s) for wait in self._waits), default=TICK_S)
                )
                self._changed.wait(self._tick_s)


def _tick_s(limit_s: float) -> float:
    return min(max(TICK_S, limit_s / TICKS_A_LIMIT), LONGEST_TICK_S)
