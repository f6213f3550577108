"""The last decision of `auto` and its reason, as data for metrics, GetStats and the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.tree import DraftShape

LOG_INTERVAL_S = 10.0
"""Least time between two log lines."""

_log = get_logger("outrider.target")


class AutoReason(Enum):
    """The reason why requests in mode `auto` draft or decode plainly.

    - PAYS: Some requests draft, because drafting is estimated to be faster.
    - DOES_NOT_PAY: No request drafts, because plain decoding is estimated to be faster.
    - PROBING: A look is under way (see `looks`): some requests draft, or all decode plainly, only to measure.
    - UNMEASURED: No request drafts, because too few rounds were measured.
    - DRAFT_AWAY: No request drafts, because the draft service cannot draft now.
    - IDLE: There has been no request in mode `auto` yet.
    """

    PAYS = "pays"
    DOES_NOT_PAY = "does_not_pay"
    PROBING = "probing"
    UNMEASURED = "unmeasured"
    DRAFT_AWAY = "draft_away"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class AutoVerdict:
    """The speculation controller's last decision.

    Attributes:
        reason: The reason for the decision.
        shapes: Number of `auto` requests that draft, by tree shape.
        plain_rows: Number of `auto` requests that decode plainly.
        batch_size: Number of requests of the round, including those in other modes.
        speedup: Estimated tokens per second of the best choice, divided by those of a round in which all
            `auto` requests decode plainly. None if there is no estimate.
        round_s: Estimated duration of a round, in seconds. None if there is no estimate.
    """

    reason: AutoReason = AutoReason.IDLE
    shapes: Mapping[DraftShape, int] = field(default_factory=dict)
    plain_rows: int = 0
    batch_size: int = 0
    speedup: float | None = None
    round_s: float | None = None

    @property
    def text(self) -> str:
        """The shapes and their numbers of entries, e.g. ``16 x chain 3, 48 plain``."""
        parts = [f"{count} x {shape.name}" for shape, count in self.shapes.items()]
        return ", ".join([*parts, f"{self.plain_rows} plain"] if self.plain_rows or not parts else parts)


class DecisionLog:
    """Logs changes of the speculation controller's decision, at most once per `LOG_INTERVAL_S` seconds.

    Rounds that only measure other tree shapes are short and regular, so they are not logged. A change is not
    logged either if only the numbers of requests with each shape change.

    Args:
        now: Returns monotonic seconds.
        write: Writes a line. By default, the line goes to the log of the target.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        write: Callable[[AutoVerdict], None] | None = None,
    ) -> None:
        self._now = now
        self._write = write or _write
        self._written_at: float | None = None
        self._written: object = None

    def forget(self) -> None:
        """Log the next decision in any case."""
        self._written_at, self._written = None, None

    def note(self, verdict: AutoVerdict) -> None:
        """Log a decision if it differs from the last logged one and `LOG_INTERVAL_S` has passed since."""
        if verdict.reason in (AutoReason.PROBING, AutoReason.UNMEASURED, AutoReason.IDLE):
            return
        key = (verdict.reason, frozenset(verdict.shapes))
        now = self._now()
        recent = self._written_at is not None and now - self._written_at < LOG_INTERVAL_S
        if key == self._written or recent:
            return
        self._written, self._written_at = key, now
        self._write(verdict)


def _write(verdict: AutoVerdict) -> None:
    _log.info(
        "auto has decided",
        reason=verdict.reason.value,
        rows=verdict.text,
        batch_size=verdict.batch_size,
        estimated_speedup=None if verdict.speedup is None else round(verdict.speedup, 3),
        round_ms=None if verdict.round_s is None else round(verdict.round_s * 1e3, 3),
    )
