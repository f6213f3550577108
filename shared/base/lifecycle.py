"""Graceful shutdown: turns SIGTERM and SIGINT into a stop flag, and runs a list of named shutdown steps.

Every service shuts down in this order:

1. Report the health status NOT_SERVING. This must come first, because gRPC's ``server.stop`` refuses new
   calls immediately.
2. Wait for the notice period, so that callers notice the new health status.
3. Stop admitting requests.
4. Let running streams finish.
5. Stop the server.
6. Join the engine thread.
7. Flush telemetry.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger("outrider.lifecycle")


class StopSignal:
    """Event that is set by the signals SIGTERM and SIGINT.

    A second signal restores the default action, so that a third signal kills the process.

    For blocking services: ``with StopSignal() as stop: server.start(); stop.wait(); run_steps([...])``.
    Only the main thread can install signal handlers. On other threads, e.g. in tests, call `set` instead.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._event.is_set():
            for stop_signal in self._previous:
                signal.signal(stop_signal, signal.SIG_DFL)
        self.received = signal.Signals(number)
        self._event.set()

    def set(self) -> None:
        """Request the stop from inside the process."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether a stop has been requested."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a stop is requested. Return False if `timeout_s` passes first."""
        return self._event.wait(timeout_s)


def watch_stop_signals(stop: asyncio.Event) -> Callable[[], None]:
    """Set `stop` when SIGTERM or SIGINT arrives in the running loop.

    Return a function that removes the handlers.
    """
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)

    def restore() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    return restore


@dataclass(frozen=True, slots=True)
class DrainStep:
    """One named step of a shutdown."""

    name: str
    run: Callable[[], object]


def run_steps(steps: Sequence[DrainStep]) -> bool:
    """Run all steps in order, even if a step fails. Log failures. Return True if every step succeeded."""
    succeeded = True
    for step in steps:
        try:
            step.run()
        except Exception:
            succeeded = False
            _log.exception("drain step failed: %s", step.name)
    return succeeded


def leave_on_terminate() -> None:
    """Turn SIGTERM into an ordinary exit, so that the process stops its child processes before it ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
