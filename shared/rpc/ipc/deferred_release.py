"""Frees GPU memory and registrations of closed connections on a background thread, when no stream waits.

The last reference to a connection may disappear on any thread at any time, for example wherever the garbage
collector runs. That may be the thread that launches rounds, which must not block for a connection that has
ended.

The driver must not block it either. While cudaFree or cudaHostUnregister waits for a stream that waits for a
word, no thread can launch anything (measured: 1.4 s of a wait of 1.5 s). These calls are therefore made when
no stream waits, if such a moment comes within `PATIENCE_S`.
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
"""How long to look for a moment at which no stream waits. Consecutive rounds leave no such moment."""
LOOK_S = 0.02

log = get_logger("outrider.rpc.ipc")


class Waiter(Protocol):
    """An object whose streams may be waiting."""

    @property
    def waiting(self) -> bool:
        """Whether a wait of its streams is still pending. May be read from any thread."""
        ...


class DeferredRelease:
    """Calls release functions one after the other on a thread that starts with the first `when_gone`."""

    def __init__(self) -> None:
        # Earliest time of each call, and the call. A SimpleQueue's `put` is reentrant, as finalizers require.
        self._pending: SimpleQueue[tuple[float, Callable[[], object]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def spare(self, waiter: Waiter) -> None:
        """Delay all release functions while `waiter` is waiting, each for at most `PATIENCE_S`.

        Keeps only a weak reference to `waiter`.
        """
        with self._lock:
            self._waiters.add(waiter)

    def when_gone(self, owner: object, free: Callable[[], object], after_s: float = 0.0) -> None:
        """Call `free` after the last reference to `owner` is gone, unless the process ends first.

        Args:
            owner: The object to watch.
            free: The function to call. It may block. It must not refer to `owner`; it keeps alive everything
                that it refers to.
            after_s: Least delay in seconds after the last reference is gone.
        """
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="deferred-release", daemon=True).start()
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
            except Exception as error:  # one device may be lost, but later entries may belong to another one
                log.warning("memory of a connection could not be freed", error=str(error))
            del free  # and the objects that it refers to

    def _somebody_waits(self) -> bool:
        with self._lock:
            waiters = list(self._waiters)
        return any(waiter.waiting for waiter in waiters)


DEFERRED_RELEASE = DeferredRelease()
"""The process-wide instance, which all connections use."""
