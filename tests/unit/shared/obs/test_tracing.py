"""Spans of requests: what they record, and how they join. By default nothing is recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.services.draft.sessions.session import PeerId
from outrider.services.draft.sessions.session_spans import SessionSpans
from outrider.services.target.api.request_spans import RequestSpans
from outrider.services.target.request import (
    EngineRequest,
    FailedEvent,
    FinishedEvent,
    SpeculationLimits,
    TokensEvent,
)
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationReport
from outrider.shared.obs.open_tracer import open_tracer
from outrider.shared.obs.otel import OtelTracer
from outrider.shared.obs.tracing import Span, Tracer, checked_traceparent

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"


class Recorded:
    """A tracer of one service, with the spans that it has recorded."""

    def __init__(self, service: str = "target", share: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(service, SimpleSpanProcessor(self._exporter), share)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """Name → span."""
        found: Sequence[ReadableSpan] = self._exporter.get_finished_spans()
        return {span.name: span for span in found}


def request(request_id: str = "r", traceparent: str = "") -> EngineRequest:
    return EngineRequest(
        request_id, (1, 2), 8, SamplingParams(), SpeculationLimits().resolve(), traceparent=traceparent
    )


def finished(request_id: str = "r") -> FinishedEvent:
    report = SpeculationReport(3.5, 4, 20, 10, (0, 1, 2, 1), "late")
    return FinishedEvent(request_id, FinishReason.STOP, 7, 100, 14, report, 0.25, 0.5, 2.0, 64)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (CALLER, True),
        (UNSAMPLED, True),
        (CALLER.upper(), False),
        ("00-" + "0" * 32 + CALLER[35:], False),
        (CALLER[:36] + "0" * 16 + "-01", False),
        (CALLER + "-extra", False),
        ("x" * 55, False),
        ("", False),
        (None, False),
        (b"bytes", False),
    ],
)
def test_only_valid_trace_contexts_are_passed_on(text: object, valid: bool) -> None:
    assert checked_traceparent(text) == (text if valid else "")


def test_without_an_endpoint_nothing_is_recorded_or_imported() -> None:
    tracer = open_tracer("gateway", "")
    assert type(tracer) is Tracer
    span = tracer.begin("POST", CALLER)
    assert type(span) is Span
    assert span.traceparent == CALLER, "the next service may trace"
    span.stage("queue", 0, 1)
    span.end({"a": 1})
    program = (
        "import sys; from outrider.services.gateway.app import run; "
        "sys.exit(any('opentelemetry.sdk' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    spans = RequestSpans(tracer, "toy")
    plain = request()
    assert spans.begin(plain, "") is plain
    assert spans.begin(plain, "nonsense") is plain
    assert spans.begin(plain, CALLER).traceparent == CALLER
    spans.end(finished())


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://x", "http://"])
def test_an_endpoint_that_is_no_url_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"otlp_endpoint: .* is not an address such as http"):
        open_tracer("gateway", endpoint)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outrider.shared.obs.otel", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'outrider\[otel\]'"):
        open_tracer("gateway", "http://127.0.0.1:4318")


def test_the_spans_of_a_request_join_across_services() -> None:
    gateway, target, draft = Recorded("gateway"), Recorded("target"), Recorded("draft")
    # The gateway's span is below the caller's.
    outer = gateway.tracer.begin("POST", CALLER)
    # The target's is below the gateway's. Its stages follow each other.
    spans = RequestSpans(target.tracer, "toy")
    traced = spans.begin(request(), outer.traceparent)
    # The draft's is below the target's.
    sessions = SessionSpans()
    sessions.tracer = draft.tracer
    sessions.opened(PeerId(1), 5, traced.traceparent)
    sessions.closing(PeerId(1), 5, None)
    spans.end(TokensEvent("r", (1, 2)))
    spans.end(finished())
    outer.end({"http.route": "/x"}, name="POST /x")

    top, middle, bottom = (
        gateway.spans["POST /x"],
        target.spans["target.generate"],
        draft.spans["draft.follow"],
    )
    assert {span.context.trace_id for span in (top, middle, bottom)} == {int(CALLER[3:35], 16)}
    assert top.parent.span_id == int(CALLER[36:52], 16)
    assert middle.parent.span_id == top.context.span_id
    assert bottom.parent.span_id == middle.context.span_id
    assert middle.resource.attributes["service.name"] == "outrider-target"
    assert middle.attributes["gen_ai.usage.input_tokens"] == 100
    assert middle.attributes["gen_ai.usage.output_tokens"] == 14
    assert middle.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert middle.attributes["gen_ai.response.model"] == "toy"
    assert middle.attributes["outrider.accept_length"] == 3.5
    assert middle.attributes["outrider.rounds"] == 4
    assert middle.attributes["outrider.accepted_histogram"] == (0, 1, 2, 1)
    assert middle.attributes["outrider.fallback_reason"] == "late"
    stages = [target.spans[name] for name in ("queue", "prefill", "decode")]
    assert [(one.end_time - one.start_time) / 1e9 for one in stages] == [0.25, 0.5, 2.0]
    assert stages[0].end_time == stages[1].start_time
    assert stages[1].end_time == stages[2].start_time
    assert {one.parent.span_id for one in stages} == {middle.context.span_id}


def test_failures_and_departures_end_spans() -> None:
    recorded = Recorded()
    spans = RequestSpans(recorded.tracer, "toy")
    spans.begin(request("a"), "")
    spans.end(FailedEvent("a", OutriderError("x", reason="kv_full")))
    failed = recorded.spans["target.generate"]
    assert failed.attributes["error.type"] == "kv_full"
    assert not failed.status.is_ok
    assert failed.parent is None, "a new trace"
    spans.begin(request("b"), "")
    spans.drop_all()
    assert recorded.spans["target.generate"].attributes["error.type"] == "cancelled"
    sessions, draft = SessionSpans(), Recorded("draft")
    sessions.tracer = draft.tracer
    sessions.opened(PeerId(1), 5, CALLER)
    sessions.opened(PeerId(2), 5, "")
    sessions.opened(PeerId(1), 5, CALLER)
    assert draft.spans["draft.follow"].attributes["error.type"] == "reopened"
    sessions.left(PeerId(1))
    sessions.left(PeerId(2))
    assert draft.spans["draft.follow"].attributes["error.type"] == "target_left"


def test_the_caller_decides_what_is_sampled() -> None:
    recorded = Recorded(share=0.0)
    recorded.tracer.begin("new").end()
    recorded.tracer.begin("unsampled", UNSAMPLED).end()
    recorded.tracer.begin("sampled", CALLER).end()
    assert recorded.spans.keys() == {"sampled"}
    flags = int(recorded.tracer.begin("new").traceparent.rpartition("-")[2], 16)
    assert flags & 1 == 0, "the next service must not sample it"


def test_a_collector_that_is_away_costs_nothing_but_the_spans() -> None:
    tracer = open_tracer("gateway", "http://127.0.0.1:9")
    tracer.begin("POST").end()
    tracer.close()
