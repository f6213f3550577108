"""The words that two processes tell each other by how far their rounds are, and the watch that bounds every wait for one.

Each word is written by one side only and holds the number of a round; numbers ascend. A wait for round n ends when the peer's word is at
least n. A side that has waited long enough, or whose peer is gone, writes the peer's word itself: what came is then of another round, which
its number says, so the round goes on without it.

    word            written by                          means
    STATE           the target, when it has put         the state of round n lies in slot n % 2
    TREES           the draft                           the trees of round n lie in slot n % 2
    TARGET_PASSED   the target, behind its wait         its wait for trees n is over
    DRAFT_PASSED    the draft, behind its wait          its wait for state n is over
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
"""How often the watch looks while something is awaited: each look takes the interpreter from a thread that launches rounds."""
TICKS_A_LIMIT = 8
"""Looks before a wait may have lasted too long, if they are not closer than TICK_S then, nor farther apart than LONGEST_TICK_S. That a
wait has begun is seen at one look, that it has lasted too long at another: it is released two ticks late at most. That is a quarter of its
limit, but 4 ms where the limit is below 16 ms, and 0.1 s where it is above 0.4 s."""


class Word(IntEnum):
    """Byte offsets in the first page of the shared memory, a cache line each."""

    STATE = 0
    TREES = 64
    TARGET_PASSED = 128
    DRAFT_PASSED = 192


class Side(Enum):
    """Who this process is."""

    TARGET = "target"
    DRAFT = "draft"


class Doorbells:
    """The words as one side sees them. `release` and the reading properties may be used from any thread.

    Args:
        memory: Its first page holds the words.
        side: Of this process.

    Attributes:
        given_at, awaited_at, passed_at: Byte offsets of what this side gives, what it waits for, and of its own progress.
    """

    def __init__(self, memory: SharedMemory, side: Side) -> None:
        self.memory = memory
        self.side = side
        target = side is Side.TARGET
        self.given_at, self.awaited_at = (Word.STATE, Word.TREES) if target else (Word.TREES, Word.STATE)
        self.passed_at = Word.TARGET_PASSED if target else Word.DRAFT_PASSED
        # One store of four bytes each: a word is never seen half written.
        self._given, self._awaited, self._passed = (
            ctypes.c_uint32.from_buffer(memory.bytes, offset)
            for offset in (self.given_at, self.awaited_at, self.passed_at)
        )

    @property
    def given(self) -> int:
        """The last round that this side gave something for."""
        return self._given.value

    @property
    def awaited(self) -> int:
        """The last round that the peer gave something for, as far as it, or `release`, said."""
        return self._awaited.value

    @property
    def passed(self) -> int:
        """The last round whose wait is over."""
        return self._passed.value

    def give(self, number: int) -> None:
        """Say from the host that this side's part of a round is there."""
        self._given.value = number

    def release(self, number: int) -> None:
        """End the wait for a round, and those before it."""
        self._awaited.value = number

    def begun(self, number: int) -> bool:
        """Whether this side stands still until the peer gives its part of a round, the first that it has not passed."""
        return self.side is Side.DRAFT or self.given >= number


@dataclass(slots=True)
class _Wait:
    number: int
    limit_s: float
    since: float | None = None


class DoorbellWatchdog:
    """Releases waits of a device that last longer than they may. A thread of its own, as the host may be waiting for the device.

    Args:
        words: Of this side.
        clock: Monotonic seconds.

    Attributes:
        broken: A wait was released since `mend`: the peer is late, or gone.
    """

    def __init__(self, words: Doorbells, clock: Callable[[], float] = time.monotonic) -> None:
        self.broken = False
        self._words = words
        self._clock = clock
        self._waits: deque[_Wait] = deque()
        self._closed = False
        # How long the thread sleeps before it looks again.
        self._tick_s = TICK_S
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def expect(self, number: int, limit_s: float) -> None:
        """Watch over a wait that is about to be enqueued."""
        with self._changed:
            self._waits.append(_Wait(number, limit_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="round-watch", daemon=True)
                self._thread.start()
            if len(self._waits) == 1 or _tick_s(limit_s) < self._tick_s:
                self._changed.notify()

    @property
    def waiting(self) -> bool:
        """Whether a wait is not over."""
        with self._changed:
            self._drop_passed()
            return bool(self._waits)

    def mend(self) -> bool:
        """Forget that a wait was released, once all are over; False while they are not."""
        with self._changed:
            self._drop_passed()
            if self._waits:
                return False
            self.broken = self._closed
            return True

    def close(self) -> None:
        """Release everything that is awaited, now and from now on; the thread ends when all waits are over."""
        with self._changed:
            self._closed = self.broken = True
            if self._waits:
                self._words.release(self._waits[-1].number)
            self._changed.notify()

    def look(self) -> None:
        """Release what has lasted too long."""
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
                # Again and again: the peer may write what it owes, a lower number, at any time.
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
                # What a broken watch has released is to be released again, see `look`.
                self._tick_s = (
                    TICK_S
                    if self.broken
                    else min((_tick_s(wait.limit_s) for wait in self._waits), default=TICK_S)
                )
                self._changed.wait(self._tick_s)


def _tick_s(limit_s: float) -> float:
    return min(max(TICK_S, limit_s / TICKS_A_LIMIT), LONGEST_TICK_S)
