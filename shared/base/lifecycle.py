"""Stopping in order: signals become one flag, and draining is a list of named steps that all run.

The order that every service follows: NOT_SERVING → notice period → stop admitting → let streams finish → stop the server → join the
engine → flush telemetry (``server.stop`` refuses new calls at once, so readiness has to fall first).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger("outrider.lifecycle")


class StopSignal:
    """Turns SIGTERM and SIGINT into an event. A second signal restores the default action, so a third one kills.

    For blocking services: ``with StopSignal() as stop: server.start(); stop.wait(); run_steps([...])``. Signal handlers can be set from
    the main thread only; elsewhere (tests) `set` does the same.
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
        """Ask for the stop from inside the process."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the stop was asked for."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the stop is asked for; returns False when `timeout_s` passed first."""
        return self._event.wait(timeout_s)


def watch_stop_signals(stop: asyncio.Event) -> Callable[[], None]:
    """Set `stop` on SIGTERM or SIGINT of the running loop; returns a function that takes the handlers away again."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)

    def restore() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    return restore


@dataclass(frozen=True, slots=True)
class DrainStep:
    """One named step of shutting down."""

    name: str
    run: Callable[[], object]


def run_steps(steps: Sequence[DrainStep]) -> bool:
    """Run all steps in order; a step that fails is logged and the rest still run. Returns whether every step succeeded."""
    succeeded = True
    for step in steps:
        try:
            step.run()
        except Exception:
            succeeded = False
            _log.exception("drain step failed: %s", step.name)
    return succeeded
