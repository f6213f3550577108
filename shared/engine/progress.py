"""Measures how long the engine's running step has taken, so that other threads can detect a stuck engine."""

from __future__ import annotations

import time


class StepClock:
    """Records when the running step began. Only the engine thread writes; any thread may read."""

    def __init__(self) -> None:
        self._began: float | None = None
        self.steps = 0

    def begin(self) -> None:
        """Note the start of a step."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Note the end of a step."""
        self._began = None
        self.steps += 1

    def running_s(self) -> float:
        """Return how long the running step has taken so far, in seconds. 0.0 between steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began
