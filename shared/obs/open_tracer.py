"""Chooses the tracer of a service (`open_tracer`). Loads OpenTelemetry only if traces have a destination."""

from __future__ import annotations

from urllib.parse import urlsplit

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.obs.tracing import Tracer


def open_tracer(service: str, endpoint: str, share: float = 1.0) -> Tracer:
    """Return the tracer of a service.

    Args:
        service: Name of the service: gateway, target or draft.
        endpoint: Address of an OpenTelemetry collector (OTLP over HTTP). If it is empty, no traces are
            recorded.
        share: Share of the traces that are recorded, 0 to 1. If a caller's `traceparent` is marked as
            sampled, the trace is always recorded.

    Raises:
        ConfigurationError: The endpoint is not a URL, or OpenTelemetry is not installed.
    """
    if not endpoint:
        return Tracer()
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise ConfigurationError(
            f"otlp_endpoint: {endpoint} is not an address such as http://127.0.0.1:4318.",
            field="otlp_endpoint",
        )
    try:
        # Imported here because nothing else needs the optional packages.
        from outrider.shared.obs.otel import exporting_tracer
    except ImportError as error:
        raise ConfigurationError(
            f"otlp_endpoint: traces need OpenTelemetry ({error}). Run: pip install 'outrider[otel]'.",
            field="otlp_endpoint",
        ) from None
    return exporting_tracer(service, endpoint, share)
