"""Logs the load and the speed of a target at regular intervals, except after intervals without any work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from outrider.services.target.engine.engine_stats import EngineStats
from outrider.shared.obs.logging import get_logger

_log = get_logger("outrider.target.status")


class StatusLine:
    """Makes the fields of a line from two snapshots of the engine's statistics."""

    def __init__(self) -> None:
        self._tokens = self._rounds = self._draft_rounds = self._accepted = self._queried = self._hits = 0
        self._at: float | None = None

    def fields(self, stats: EngineStats, now: float) -> dict[str, Any] | None:
        """Return the fields of the status line for the time since the last call, or None if nothing happened.

        Args:
            stats: The engine's statistics now.
            now: The time now, from `time.monotonic()`, in seconds.
        """
        tokens, rounds = stats.generated_tokens - self._tokens, stats.rounds - self._rounds
        draft_rounds = stats.speculation.draft_rounds - self._draft_rounds
        accepted = stats.speculation.accepted_tokens - self._accepted
        elapsed_s = None if self._at is None else now - self._at
        self._tokens, self._rounds, self._at = stats.generated_tokens, stats.rounds, now
        self._draft_rounds += draft_rounds
        self._accepted += accepted
        if not (tokens or rounds or stats.running or stats.waiting):
            return None
        fields: dict[str, Any] = {"running": stats.running, "waiting": stats.waiting}
        if elapsed_s:
            fields["tokens_per_s"] = round(max(tokens, 0) / elapsed_s, 1)
        # The engine counts a request's drafts when the request ends.
        if draft_rounds > 0 and accepted >= 0:
            fields["accept_length"] = round(1 + accepted / draft_rounds, 2)
        fields["kv_usage"] = round(stats.pages_held / stats.pages_total, 3) if stats.pages_total else 0.0
        queried = stats.prefixes.queried_tokens - self._queried
        hits = stats.prefixes.hit_tokens - self._hits
        self._queried, self._hits = stats.prefixes.queried_tokens, stats.prefixes.hit_tokens
        if queried > 0:
            fields["prefix_hits"] = round(max(hits, 0) / queried, 3)
        fields["speculation"] = stats.draft_state.value
        fields["auto"] = stats.verdict.reason.value
        return fields


async def log_status(stats: Callable[[], EngineStats], interval_s: float) -> None:
    """Until cancelled, log a line every `interval_s` seconds if something happened. With 0, log nothing."""
    line = StatusLine()
    line.fields(stats(), time.monotonic())
    while interval_s:
        await asyncio.sleep(interval_s)
        if (fields := line.fields(stats(), time.monotonic())) is not None:
            _log.info("status", **fields)
