"""The text that Prometheus reads."""

from __future__ import annotations

from outrider.services.gateway.metrics import GatewayMetrics
from outrider.shared.base.version import installed_version
from outrider.shared.obs.metrics import Metrics


def test_an_exposition_has_no_times_of_creation() -> None:
    metrics = Metrics()
    metrics.counter("things", "x").inc()
    metrics.histogram("seconds", "x", (1.0,)).observe(0.5)
    assert "_created" not in metrics.render()
    assert "outrider_things_total 1.0" in metrics.render()


def test_the_gateway_tells_its_version() -> None:
    assert f'outrider_build_info{{version="{installed_version()}"}} 1.0' in GatewayMetrics().render()
