"""Metrics of the processes of target and draft: how long they have run, and how often the draft was lost."""

from __future__ import annotations

from outrider.shared.base.resources import ResourceStats
from outrider.shared.obs.metrics import Metrics

OWN_PROCESS = frozenset(["ipc", "grpc"])
"""The transports to a draft that has a process of its own."""


def process_metrics(uptime_s: float, resources: ResourceStats) -> str:
    """Return the metrics as Prometheus text.

    Args:
        uptime_s: Seconds since the target's process began to load.
        resources: Describes the connection to the draft. Without a draft in a process of its own, the text
            has no metrics of a draft. Without a connection, it has no uptime of the draft.
    """
    metrics = Metrics()
    metrics.gauge("target_uptime_seconds", "Time since the target's process began to load.").set(uptime_s)
    if resources.draft_transport in OWN_PROCESS:
        lost = metrics.counter("draft_connections_lost", "Lost connections to the draft.")
        lost.inc(resources.draft_connections_lost)
    if resources.draft_uptime_s is not None:
        uptime = metrics.gauge("draft_uptime_seconds", "Time since the draft's process began to load.")
        uptime.set(resources.draft_uptime_s)
    return metrics.render()
