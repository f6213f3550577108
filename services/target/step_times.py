"""Timestamps of one step of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """`time.monotonic()` at the seams of one step."""

    started: float
    announced: float = 0.0
    prefilled: float = 0.0
    proposed: float = 0.0
    verified: float = 0.0
    committed: float = 0.0

    @property
    def draft_wait_s(self) -> float:
        """How long the step stood still for the proposal."""
        return self.proposed - self.prefilled

    @property
    def verify_s(self) -> float:
        """Verifying, compaction and reading the outcome back included."""
        return self.verified - self.proposed

    @property
    def overhead_s(self) -> float:
        """Scheduling, announcing, delivering and committing."""
        return (self.announced - self.started) + (self.committed - self.verified)
