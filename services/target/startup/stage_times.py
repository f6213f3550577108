"""Measures how long the stages of a start take."""

from __future__ import annotations

import time

from outrider.shared.base.process_age import process_age_s
from outrider.shared.obs.logging import get_logger

_log = get_logger("outrider.target")


class StageTimes:
    """Measures the seconds of each stage of the target's start, for the log line `start`.

    Attributes:
        seconds: Seconds by stage, in the order of the stages. `imports` is the time from the start of the
            process to the first stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        age_s = process_age_s()
        if age_s is not None:
            self.seconds["imports"] = round(age_s, 2)
        self._last = time.monotonic()

    def done(self, stage: str) -> None:
        """Note that a stage has ended. Its time is the time since the end of the previous stage."""
        now = time.monotonic()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self._last, 2)
        self._last = now

    def log(self) -> None:
        """Log the seconds of all stages."""
        _log.info("start", **{f"{stage}_s": seconds for stage, seconds in self.seconds.items()})
