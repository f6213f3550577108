"""The thread that runs an engine: steps while there is work, waits on an event otherwise. Forward passes never run elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

SWITCH_INTERVAL_S = 1e-4
"""How long another Python thread may hold the interpreter while the engine wants it; CPython's default of 5 ms costs whole steps."""

_log = logging.getLogger("outrider.engine")


class Steppable(Protocol):
    """What the thread drives. All methods are called on the engine thread."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do now."""
        ...

    def step(self) -> None:
        """Do one step."""
        ...

    def next_wakeup(self) -> float | None:
        """Return the `time.monotonic()` at which something is due even if nobody calls `wake`, or None."""
        ...

    def step_failed(self, error: Exception) -> None:
        """A step raised: give up what it worked on, keep the rest going."""
        ...


class WakeUp(Protocol):
    """What the thread sleeps on: a `threading.Event`, or one that wakes for other things too."""

    def set(self) -> None:
        """End the present or the next `wait`. Any thread."""
        ...

    def clear(self) -> None:
        """Undo `set`."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until `set`, at most `timeout` seconds; may return early."""
        ...


class EngineThread:
    """Runs one engine until `stop`. `wake` may be called from any thread, and is cheap.

    Args:
        engine: What to run.
        name: The thread's name.
        on_start: Called first on the thread, e.g. to choose its CUDA device.
        event: What it sleeps on when the engine has no work; an event of its own by default.
    """

    def __init__(
        self,
        engine: Steppable,
        name: str = "engine",
        on_start: Callable[[], None] = lambda: None,
        event: WakeUp | None = None,
    ) -> None:
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
        """Make a waiting engine look for work."""
        self._event.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the running step finish, then end the thread.

        Raises:
            RuntimeError: The step did not end in time.
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
            if self._stopping:  # looked at after the clear, or a stop could be slept through
                return
            if engine.has_work():
                try:
                    engine.step()
                except (
                    Exception
                ) as error:  # a bug or a device fault: the requests in hand fail, the service lives
                    _log.exception("an engine step failed")
                    engine.step_failed(error)
                continue
            due = engine.next_wakeup()
            event.wait(None if due is None else max(0.0, due - time.monotonic()))
