"""Gives back what streams of a GPU may still use, on a thread of its own: that waits for them, and the driver's calls wait for the device.

The last reference to a connection may go on any thread and at any time, as where the garbage collector happens to run: on the thread that
launches rounds too, which must not stand still for a connection that is over. Nor may it be held up by the driver: while cudaFree or
cudaHostUnregister waits for a stream that waits for a word, no thread can launch anything (measured: 1.4 s of a wait of 1.5). So they are
called when no stream waits, if there is such a moment.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from outrider.shared.obs.logging import get_logger

PATIENCE_S = 30.0
"""So long is a moment looked for at which no stream waits. Between rounds that follow each other there is none."""
LOOK_S = 0.02

log = get_logger("outrider.rpc.ipc")


class Waiter(Protocol):
    """Knows of waits of streams."""

    @property
    def waiting(self) -> bool:
        """Whether one is not over. Any thread."""
        ...


class DeferredRelease:
    """Calls functions one after the other, on a thread that starts with the first owner and stays."""

    def __init__(self) -> None:
        # From when on each may be called. A simple queue's `put` may interrupt itself, as finalizers do.
        self._pending: SimpleQueue[tuple[float, Callable[[], object]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def spare(self, waiter: Waiter) -> None:
        """Call nothing while `waiter`, as long as there is it, is waiting, but for what has waited for that for long."""
        with self._lock:
            self._waiters.add(waiter)

    def when_gone(self, owner: object, free: Callable[[], object], after_s: float = 0.0) -> None:
        """Have `free` called some time after the last reference to `owner` has gone, unless the process ends before.

        Args:
            owner: Whose end is awaited.
            free: May wait. It must not refer to `owner`; what it refers to lives as long.
            after_s: How long after that at least.
        """
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="disposal", daemon=True).start()
        weakref.finalize(owner, self._put, free, after_s).atexit = False

    def _put(self, free: Callable[[], object], after_s: float) -> None:
        self._pending.put((time.monotonic() + after_s, free))

    def _run(self) -> None:
        while True:
            due, free = self._pending.get()
            time.sleep(max(0.0, due - time.monotonic()))
            while self._somebody_waits() and time.monotonic() < due + PATIENCE_S:
                time.sleep(LOOK_S)
            try:
                free()
            except Exception as error:  # the device may be lost; what comes after may be of another one
                log.warning("memory of a connection could not be given back", error=str(error))
            del free  # and with it what it refers to

    def _somebody_waits(self) -> bool:
        with self._lock:
            waiters = list(self._waiters)
        return any(waiter.waiting for waiter in waiters)


DISPOSAL = DeferredRelease()
"""Of this process."""
