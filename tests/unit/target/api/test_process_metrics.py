"""The metrics of the processes of target and draft."""

from __future__ import annotations

from outrider.services.target.api.process_metrics import process_metrics
from outrider.shared.base.resources import ResourceStats


def lines(resources: ResourceStats) -> list[str]:
    return [line for line in process_metrics(9.5, resources).splitlines() if not line.startswith("#")]


def test_a_draft_in_a_process_of_its_own_has_metrics() -> None:
    connected = ResourceStats(draft_transport="ipc", draft_uptime_s=4.5, draft_connections_lost=2)
    assert lines(connected) == [
        "outrider_target_uptime_seconds 9.5",
        "outrider_draft_connections_lost_total 2.0",
        "outrider_draft_uptime_seconds 4.5",
    ]
    away = ResourceStats(draft_transport="grpc", draft_connections_lost=1)
    assert lines(away)[1:] == ["outrider_draft_connections_lost_total 1.0"]


def test_without_a_draft_process_there_is_only_the_target() -> None:
    for transport in ("none", "inproc"):
        assert lines(ResourceStats(draft_transport=transport)) == ["outrider_target_uptime_seconds 9.5"]
