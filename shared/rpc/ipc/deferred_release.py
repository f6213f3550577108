"""Frees the GPU memory and registrations of closed connections on a background thread.

The thread that launches rounds must not be blocked. However, the last reference to a connection may disappear
on any thread, including the launching thread. The memory is therefore freed on a background thread.

Even on a background thread, cudaFree and cudaHostUnregister can block launches. While they wait for a stream
that itself waits for a value in memory, the CUDA driver lets no thread launch work. In a measurement, a wait
of 1.5 s blocked launches for 1.4 s. The background thread therefore calls these functions when no stream
waits for a value, or after `PATIENCE_S` seconds at the latest.
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
"""Longest time for which the thread delays a release until no stream waits.

While one round follows another, a stream waits almost always.
"""
LOOK_S = 0.02

log = get_logger("outrider.rpc.ipc")


class Waiter(Protocol):
    """An object whose streams may be waiting."""

    @property
    def waiting(self) -> bool:
        """Whether a stream of this object is still waiting. May be read from any thread."""
        ...


class DeferredRelease:
    """Calls release functions, one after the other, on a thread that the first `when_gone` starts."""

    def __init__(self) -> None:
        # Pairs of the earliest time of a call and the call. Finalizers need a reentrant `put`, as in
        # SimpleQueue.
        self._pending: SimpleQueue[tuple[float, Callable[[], object]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def spare(self, waiter: Waiter) -> None:
        """Delay every release function while `waiter` is waiting, but for at most `PATIENCE_S`.

        Keeps only a weak reference to `waiter`.
        """
        with self._lock:
            self._waiters.add(waiter)

    def when_gone(self, owner: object, free: Callable[[], object], after_s: float = 0.0) -> None:
        """Call `free` after the last reference to `owner` is gone, unless the process ends first.

        Args:
            owner: The object to watch.
            free: The function to call. The function may block. It must not refer to `owner`, because such a
                reference would keep `owner` alive.
            after_s: Shortest delay, in seconds, after the last reference is gone.
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
            except Exception as error:  # later entries may belong to a device that is not lost
                log.warning("memory of a connection could not be freed", error=str(error))
            del free  # also frees the objects that the function refers to

    def _somebody_waits(self) -> bool:
        with self._lock:
            waiters = list(self._waiters)
        return any(waiter.waiting for waiter in waiters)


DEFERRED_RELEASE = DeferredRelease()
"""The process-wide instance, which all connections use."""
