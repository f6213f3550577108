"""The watchdog over waits for another process: it releases waits that last too long, and no other waits."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from outrider.shared.rpc.ipc import doorbells
from outrider.shared.rpc.ipc.blob_mailbox import BlobLayout
from outrider.shared.rpc.ipc.doorbells import Doorbells, DoorbellWatchdog, Side
from outrider.shared.rpc.ipc.slots import SharedMemory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pair() -> tuple[Doorbells, Doorbells]:
    """The words as target and draft see them, each through its own mapping."""
    layout = BlobLayout(256, 256).memory
    memory, file = SharedMemory.create(layout)
    other = SharedMemory.attach(layout, file)
    os.close(file)
    return Doorbells(memory, Side.TARGET), Doorbells(other, Side.DRAFT)


def pass_round(words: Doorbells, number: int) -> None:
    """Mark the current wait as over, as the device does."""
    ctypes.c_uint32.from_buffer(words.memory.bytes, words.passed_at).value = number


class HandWatch(DoorbellWatchdog):
    """A watchdog that checks only when the test calls `look`."""

    def _run(self) -> None:
        pass


def breaks(watch: DoorbellWatchdog) -> bool:
    """Return whether the watchdog's own thread ends a wait within a few seconds."""
    for _ in range(1000):
        if watch.broken:
            return True
        threading.Event().wait(0.005)
    return False


def test_each_side_sees_the_others_announcements(pair: tuple[Doorbells, Doorbells]) -> None:
    target, draft = pair
    target.give(7)
    assert (target.given, draft.awaited, draft.given, target.awaited) == (7, 7, 0, 0)
    draft.give(6)
    pass_round(draft, 7)
    assert (target.awaited, draft.passed, target.passed) == (6, 7, 0)


def test_the_limit_of_a_wait_counts_from_when_the_device_stands_still(
    pair: tuple[Doorbells, Doorbells],
) -> None:
    target, _draft = pair
    clock = Clock()
    watch = HandWatch(target, clock)
    watch.expect(5, 0.1)
    for _ in range(3):  # the device is still working on the previous round, so this state is not there yet
        clock.now += 10.0
        watch.look()
    assert not watch.broken
    target.give(5)
    watch.look()
    clock.now += 0.09
    watch.look()
    assert not watch.broken
    assert target.awaited == 0
    clock.now += 0.02
    watch.look()
    assert watch.broken
    assert target.awaited == 5


def test_trees_on_time_release_nothing(pair: tuple[Doorbells, Doorbells]) -> None:
    target, draft = pair
    clock = Clock()
    watch = HandWatch(target, clock)
    watch.expect(5, 0.1)
    target.give(5)
    watch.look()
    draft.give(5)
    clock.now += 5.0
    watch.look()
    assert not watch.broken
    assert not watch.mend(), "the device has not passed the wait yet"
    pass_round(target, 5)
    assert watch.mend()


def test_a_late_peer_cannot_undo_the_release(pair: tuple[Doorbells, Doorbells]) -> None:
    target, draft = pair
    clock = Clock()
    watch = HandWatch(target, clock)
    watch.expect(5, 0.1)
    watch.expect(6, 0.1)
    target.give(5)
    watch.look()
    clock.now += 1.0
    watch.look()
    assert target.awaited == 6, "later rounds are released too"
    draft.give(4)  # the blob that it owed arrives late
    watch.look()
    assert target.awaited == 6
    pass_round(target, 6)
    watch.look()
    draft.give(5)
    assert watch.mend()
    assert not watch.broken
    watch.look()
    assert target.awaited == 5, "without any wait, the word stays untouched"


def test_a_closed_watchdog_releases_later_waits_too(pair: tuple[Doorbells, Doorbells]) -> None:
    target, _draft = pair
    watch = HandWatch(target, Clock())
    watch.expect(5, 1000.0)
    watch.close()
    assert target.awaited == 5
    watch.expect(9, 1000.0)
    watch.look()
    assert target.awaited == 9
    pass_round(target, 9)
    assert watch.mend()
    assert watch.broken, "there is no peer any more"


def test_the_watchdog_thread_releases_waits_on_its_own(pair: tuple[Doorbells, Doorbells]) -> None:
    _target, draft = pair
    watch = DoorbellWatchdog(draft)
    watch.expect(1, 0.02)
    assert breaks(watch)
    assert draft.awaited == 1
    pass_round(draft, 1)
    watch.close()


class ReleasedError(Exception):
    """Raised when a wait is released."""


class Pauses(threading.Condition):
    """The watchdog's sleep: advances the test's clock. The first sleep begins a wait on the device."""

    def __init__(self, clock: Clock, words: Doorbells, number: int, watch: DoorbellWatchdog) -> None:
        super().__init__()
        self.began = 0.0
        self._clock, self._words, self._number, self._watch = clock, words, number, watch

    def wait(self, timeout: float | None = None) -> bool:
        if self._watch.broken:
            raise ReleasedError
        if self._words.given < self._number:
            self.began = self._clock.now
            self._words.give(self._number)
        assert timeout is not None
        self._clock.now += timeout
        return False


@pytest.mark.parametrize("limit_s", [0.003, 0.008, 0.016, 0.03, 0.08, 0.4, 2.0])
def test_a_wait_is_released_at_most_two_ticks_late(pair: tuple[Doorbells, Doorbells], limit_s: float) -> None:
    target, _draft = pair
    clock = Clock()
    watch = HandWatch(target, clock)
    watch.expect(1, limit_s)
    pauses = watch._changed = Pauses(clock, target, 1, watch)
    with pytest.raises(ReleasedError):
        DoorbellWatchdog._run(watch)
    assert target.awaited == 1
    late = clock.now - pauses.began - limit_s
    assert 0.0 < late <= min(max(limit_s / 4, 0.004), 0.1) + 1e-9


def test_long_waits_are_checked_rarely_and_a_shorter_one_is_still_on_time(
    pair: tuple[Doorbells, Doorbells], monkeypatch: pytest.MonkeyPatch
) -> None:
    _target, draft = pair
    looks = threading.Semaphore(0)

    class Counted(DoorbellWatchdog):
        def look(self) -> None:
            super().look()
            looks.release()

    monkeypatch.setattr(doorbells, "LONGEST_TICK_S", 1000.0)
    watch = Counted(draft)
    watch.expect(1, 1e6)
    assert looks.acquire(timeout=10.0)
    assert not looks.acquire(timeout=20 * doorbells.TICK_S), "the watchdog must not check all the time"
    pass_round(draft, 1)
    watch.expect(2, 0.02)
    assert breaks(watch)
    assert draft.awaited == 2
    pass_round(draft, 2)
    watch.close()
