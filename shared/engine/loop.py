"""The engine thread: runs an engine's steps while there is work, and otherwise sleeps until an event.

All forward passes run on this thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from outrider.shared.engine.progress import StepClock

SWITCH_INTERVAL_S = 1e-4
"""How long another Python thread may keep the GIL while the engine waits for it.

CPython's default of 5 ms would delay the engine by one or more steps.
"""

_log = logging.getLogger("outrider.engine")


class Steppable(Protocol):
    """An engine that the thread drives. All methods are called on the engine thread."""

    def has_work(self) -> bool:
        """Return whether `step` has anything to do now."""
        ...

    def step(self) -> None:
        """Do one step of work."""
        ...

    def next_wakeup(self) -> float | None:
        """Return the `time.monotonic()` at which the next work is due without a `wake`, or None."""
        ...

    def step_failed(self, error: Exception) -> None:
        """Handle an error of `step`: fail the requests that the step worked on, and let the others run."""
        ...


class WakeUp(Protocol):
    """The event that the thread sleeps on: a `threading.Event`, or one that also wakes for other reasons."""

    def set(self) -> None:
        """End the current or the next `wait`. May be called from any thread."""
        ...

    def clear(self) -> None:
        """Undo `set`, so that the next `wait` sleeps."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until `set`, for at most `timeout` seconds. May return early."""
        ...


class EngineThread:
    """Thread that runs one engine until `stop` is called. Any thread may call the cheap method `wake`.

    Args:
        engine: The engine to run.
        name: The thread's name.
        on_start: Function that the thread calls first, e.g. to select its CUDA device.
        event: The event that the thread sleeps on when the engine has no work. By default, a new
            `threading.Event`.
        on_error: Function that the thread calls after `Steppable.step_failed`, with the same error.

    Attributes:
        clock: A `StepClock`, which measures how long the running step has taken.
    """

    def __init__(
        self,
        engine: Steppable,
        name: str = "engine",
        on_start: Callable[[], None] = lambda: None,
        event: WakeUp | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.clock = StepClock()
        self._on_error = on_error
        self._engine = engine
        self._on_start = on_start
        self._event: WakeUp = event or threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Shortens the interpreter's switch interval for the whole process."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def wake(self) -> None:
        """Make a sleeping engine check for work."""
        self._event.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the running step finish, then end the thread.

        Raises:
            RuntimeError: The step did not end within `timeout_s`.
        """
        self._stopping = True
        self._event.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the engine thread did not stop within {timeout_s} s")

    def _run(self) -> None:
        engine, event = self._engine, self._event
        self._on_start()
        while True:
            event.clear()
            # Check after the clear, because otherwise the thread could sleep through a stop.
            if self._stopping:
                return
            if engine.has_work():
                self.clock.begin()
                try:
                    engine.step()
                # A bug or a device fault is the cause: fail only the requests of this step.
                except Exception as error:
                    _log.exception("an engine step failed")
                    engine.step_failed(error)
                    self._on_error(error)
                finally:
                    self.clock.end()
                continue
            due = engine.next_wakeup()
            event.wait(None if due is None else max(0.0, due - time.monotonic()))
