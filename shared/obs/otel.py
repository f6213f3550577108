"""Records spans with OpenTelemetry and sends them to a collector (OTLP over HTTP). Needs the extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.shared.base.version import installed_version
from outrider.shared.obs.tracing import ERROR, TRACEPARENT, AttributeValue, Span, Tracer

TIMEOUT_S = 3.0
"""How long one attempt to send spans may take."""
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan(Span):
    """A span of OpenTelemetry."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        super().__init__(carrier.get(TRACEPARENT, ""))
        self._tracer = tracer
        self._span = span

    def stage(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a child span with these times, in nanoseconds since 1970."""
        parent = trace.set_span_in_context(self._span)
        self._tracer.start_span(name, parent, start_time=start_ns).end(end_time=max(start_ns, end_ns))

    def end(
        self, attributes: Mapping[str, AttributeValue] | None = None, error: str = "", name: str | None = None
    ) -> None:
        """End the span; see the base class."""
        if name is not None:
            self._span.update_name(name)
        for key, value in (attributes or {}).items():
            self._span.set_attribute(key, value)
        if error:
            self._span.set_attribute(ERROR, error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end(end_time=time.time_ns())


class OtelTracer(Tracer):
    """Tracer that records OpenTelemetry spans.

    Args:
        service: Name of the service: gateway, target or draft.
        processor: The span processor that receives the ended spans.
        share: Share of the traces that are recorded, 0 to 1. If a request has a ``traceparent``, the sampled
            flag in the ``traceparent`` decides instead.
    """

    active = True

    def __init__(self, service: str, processor: SpanProcessor, share: float = 1.0) -> None:
        resource = Resource.create(
            {"service.name": f"outrider-{service}", "service.version": installed_version()}
        )
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(share)), resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("outrider")

    def begin(self, name: str, traceparent: str = "") -> Span:
        """Begin a span; see the base class."""
        parent = _PROPAGATOR.extract({TRACEPARENT: traceparent}) if traceparent else None
        # Pass the context explicitly, because this task may run in the context of another span of the host
        # program.
        return OtelSpan(self._tracer, self._tracer.start_span(name, parent or Context()))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def exporting_tracer(service: str, endpoint: str, share: float) -> Tracer:
    """Return a tracer that sends its spans in batches, from a thread of its own.

    Args:
        service: Name of the service: gateway, target or draft.
        endpoint: Address of the collector, without ``/v1/traces``.
        share: Share of the traces that are recorded.
    """
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
    return OtelTracer(service, BatchSpanProcessor(exporter), share)
