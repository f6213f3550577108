"""Timestamps of one engine step, and the durations derived from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Times at which the phases of a step ended, in order, from `time.monotonic()`."""

    started: float
    announced: float = 0.0
    prefilled: float = 0.0
    proposed: float = 0.0
    verified: float = 0.0
    committed: float = 0.0

    @property
    def draft_wait_s(self) -> float:
        """Seconds that the step waited for the proposal."""
        return self.proposed - self.prefilled

    @property
    def verify_s(self) -> float:
        """Seconds of verification, including compaction and reading the result back."""
        return self.verified - self.proposed

    @property
    def overhead_s(self) -> float:
        """Seconds of scheduling, announcing, delivering and committing."""
        return (self.announced - self.started) + (self.committed - self.verified)
