"""The draft's Prometheus metrics.

The draft's gRPC call `GetInfo` returns the metrics as text. The target adds this text to its own metrics. The
gateway exposes all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.shared.obs.metrics import STEP_BUCKETS_S, Metrics


class DraftMetrics(Metrics):
    """All metrics of one draft process."""

    def __init__(self) -> None:
        super().__init__()
        self.trees = self.counter("draft_trees", "Trees proposed.")
        self.resyncs = self.counter(
            "draft_lost_sequences", "Sequences that the draft lost; the target opens them again.", ["reason"]
        )
        self.dropped = self.counter(
            "draft_messages_dropped",
            "Messages that were late, repeated, stale or refused.",
            ["message", "reason"],
        )
        self.evicted = self.counter(
            "draft_sessions_evicted", "Idle sessions evicted to make room for others."
        )
        self.expired = self.counter("draft_sessions_expired", "Sessions of targets that stopped responding.")
        self.failures = self.counter("draft_step_failures", "Steps that raised an exception.")
        self.extend_seconds = self.histogram(
            "draft_extend_seconds", "Time per step to add committed rows to the draft's KV.", STEP_BUCKETS_S
        )
        self.propose_seconds = self.histogram(
            "draft_propose_seconds", "Time per step to grow trees.", STEP_BUCKETS_S
        )
        self._sessions = self.gauge("draft_sessions", "Sequences followed now.")
        self._pages = self.gauge("draft_kv_pages", "Pages of the draft's KV pool.", ["state"])

    def watch(self, sessions: Callable[[], int], free: Callable[[], int], held: Callable[[], int]) -> None:
        """Read the gauges from these functions each time the metrics are rendered."""
        self._sessions.set_function(sessions)
        self._pages.labels(state="free").set_function(free)
        self._pages.labels(state="held").set_function(held)
