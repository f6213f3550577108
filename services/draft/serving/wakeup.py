"""Puts the draft's engine thread to sleep, and wakes it for other threads' commands and for socket data.

Before sleeping, the engine thread may busy-poll for a short time. An expected message is then handled
immediately.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Protocol

from outrider.shared.engine.loop import WakeUp
from outrider.shared.rpc.ipc.frames import SPIN_S


class Source(Protocol):
    """A stream whose socket the engine thread itself reads."""

    def fileno(self) -> int:
        """Return the file descriptor to wait on."""
        ...

    @property
    def has_unsent(self) -> bool:
        """True if data is left to send. The thread then also wakes up when the socket is writable."""
        ...

    def ready(self) -> None:
        """Read what has arrived and send what is left. Never blocks and never raises."""
        ...


class SourceWakeUp(WakeUp):
    """A `WakeUp` of the draft's engine thread that also wakes the thread when socket data can be read.

    Any thread may call `set`. The other methods are for the engine thread only.
    """

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
        """Wake up for `source` from now on."""
        self._sources[source.fileno()] = source
        self._poll.register(source.fileno(), select.POLLIN)

    def remove(self, source: Source) -> None:
        """Stop waking up for `source`. Call this before its descriptor is closed."""
        for descriptor in [number for number, known in self._sources.items() if known is source]:
            del self._sources[descriptor]
            self._waiting_to_write.discard(descriptor)
            self._poll.unregister(descriptor)

    def ready(self) -> bool:
        """True if a source is ready, so that `read` has work."""
        return bool(self._sources) and any(descriptor != self._event for descriptor, _ in self._poll.poll(0))

    def read(self) -> None:
        """Call `ready` of every source that is ready."""
        for descriptor, _ in self._poll.poll(0) if self._sources else ():
            source = self._sources.get(descriptor)
            if source is not None:
                source.ready()

    def stay_awake(self, seconds: float) -> None:
        """Make the engine thread busy-poll for this many seconds from now, because a message is due.

        The call has no effect on a machine with few cores, where the sender of the message needs the core.
        """
        self._awake_until_s = max(self._awake_until_s, time.monotonic() + seconds)

    def set(self) -> None:
        with self._lock:
            if not self._is_set and not self._closed:
                self._is_set = True
                os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        with self._lock:
            if self._is_set:
                self._is_set = False
                os.eventfd_read(self._event)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until `set`, a ready source, or `timeout` seconds. With sources, busy-poll first."""
        self._watch_writers()
        if self._sources and SPIN_S:
            until = max(time.monotonic() + SPIN_S, self._awake_until_s)
            while time.monotonic() < until:
                if self._poll.poll(0):
                    return True
        return bool(self._poll.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        """Close the event descriptor, once the engine thread has ended."""
        with self._lock:
            self._closed = True
            os.close(self._event)

    def _watch_writers(self) -> None:
        """Poll a source for writability only while the source has unsent data."""
        for descriptor, source in self._sources.items():
            if source.has_unsent != (descriptor in self._waiting_to_write):
                self._waiting_to_write ^= {descriptor}
                self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if source.has_unsent else 0))
