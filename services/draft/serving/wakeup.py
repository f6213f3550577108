"""What the draft's engine thread sleeps on: other threads, and the sockets that it reads itself."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Protocol

from outrider.shared.rpc.ipc.frames import SPIN_S


class Source(Protocol):
    """A stream that the engine thread reads."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether it also waits until it can be written to."""
        ...

    def ready(self) -> None:
        """Take in what has arrived, and send what could not be sent; never waits, never raises."""
        ...


class SourceWakeUp:
    """A `WakeUp` that sources end too. `set` may be called from any thread, the rest from the engine thread only."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_set = False
        self._closed = False
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._waiting_to_write: set[int] = set()
        self._awake_until_s = 0.0

    def add(self, source: Source) -> None:
        """Wake up for `source` too."""
        self._sources[source.fileno()] = source
        self._poll.register(source.fileno(), select.POLLIN)

    def remove(self, source: Source) -> None:
        """Forget `source`; call it before its descriptor is closed."""
        for descriptor in [number for number, known in self._sources.items() if known is source]:
            del self._sources[descriptor]
            self._waiting_to_write.discard(descriptor)
            self._poll.unregister(descriptor)

    def ready(self) -> bool:
        """Whether `read` has anything to do."""
        return bool(self._sources) and any(descriptor != self._event for descriptor, _ in self._poll.poll(0))

    def read(self) -> None:
        """Have every source that is ready take in what arrived."""
        for descriptor, _ in self._poll.poll(0) if self._sources else ():
            source = self._sources.get(descriptor)
            if source is not None:
                source.ready()

    def stay_awake(self, seconds: float) -> None:
        """Ask again and again for so long from now before the next sleep, where there are cores for that: something is about to come."""
        self._awake_until_s = max(self._awake_until_s, time.monotonic() + seconds)

    def set(self) -> None:
        """See `WakeUp.set`."""
        with self._lock:
            if not self._is_set and not self._closed:
                self._is_set = True
                os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """See `WakeUp.clear`."""
        with self._lock:
            if self._is_set:
                self._is_set = False
                os.eventfd_read(self._event)

    def wait(self, timeout: float | None = None) -> bool:
        """See `WakeUp.wait`; with sources it asks again and again for a moment before it sleeps."""
        self._watch_writers()
        if self._sources and SPIN_S:
            until = max(time.monotonic() + SPIN_S, self._awake_until_s)
            while time.monotonic() < until:
                if self._poll.poll(0):
                    return True
        return bool(self._poll.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        """Free the descriptor, once the thread has ended."""
        with self._lock:
            self._closed = True
            os.close(self._event)

    def _watch_writers(self) -> None:
        """Wait for room where something is left to send, and only there."""
        for descriptor, source in self._sources.items():
            if source.has_unsent != (descriptor in self._waiting_to_write):
                self._waiting_to_write ^= {descriptor}
                self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if source.has_unsent else 0))
