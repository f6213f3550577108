"""Traces of requests through real processes, received by a collector in the test; and the draft's metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.services.stack import PROMPTS, supervised

from outrider.gateway.v1 import gateway_pb2

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
GRPC_TRACE = "1" * 32


class Collector:
    """What a collector has received.

    Attributes:
        spans: (service, span) in the order of arrival.
        paths: Paths of the requests.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.paths: set[str] = set()
        self.url = ""

    def of(self, trace: str) -> dict[tuple[str, str], Span]:
        """Return (service, name) → span of one trace."""
        return {(service, span.name): span for service, span in self.spans if span.trace_id.hex() == trace}


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.paths.add(self.path)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {one.key: one.value.string_value for one in group.resource.attributes}
                for scope in group.scope_spans:
                    found.spans += [(names["service.name"], span) for span in scope.spans]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def values(span: Span) -> dict[str, object]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in span.attributes
    }


def test_one_trace_leads_through_gateway_target_and_draft() -> None:
    with collector() as found:
        with supervised("--transport", "grpc", "--otlp-endpoint", found.url) as stack:
            body = {"max_tokens": 24, "ignore_eos": True, "temperature": 0, "speculation": {"mode": "on"}}
            body["messages"] = [{"role": "user", "content": PROMPTS[0]}]
            body["model"] = httpx.get(f"{stack.base_url}/v1/models").json()["data"][0]["id"]
            reply = httpx.post(
                f"{stack.base_url}/v1/chat/completions",
                json=body,
                headers={"traceparent": TRACEPARENT},
                timeout=60,
            )
            assert reply.status_code == 200, reply.text
            with grpc.insecure_channel(stack.grpc_address) as channel:
                call = channel.unary_stream(
                    "/outrider.gateway.v1.Inference/Complete",
                    request_serializer=gateway_pb2.CompleteRequest.SerializeToString,
                    response_deserializer=gateway_pb2.CompleteReply.FromString,
                )
                request = gateway_pb2.CompleteRequest(
                    text="One two", options=gateway_pb2.GenerationOptions(max_tokens=4)
                )
                list(call(request, metadata=[("traceparent", f"00-{GRPC_TRACE}-{CALLER}-01")], timeout=60))
            # The draft's metrics arrive with one of the next replies.
            deadline = time.monotonic() + 30
            while "outrider_draft_trees_total" not in httpx.get(f"{stack.base_url}/metrics").text:
                assert time.monotonic() < deadline
        # The services have sent their spans before they ended.
        assert found.paths == {"/v1/traces"}
        trace = found.of(TRACE)
        gateway = trace["outrider-gateway", "POST /v1/chat/completions"]
        target = trace["outrider-target", "target.generate"]
        draft = trace["outrider-draft", "draft.follow"]
        assert gateway.parent_span_id.hex() == CALLER
        assert target.parent_span_id == gateway.span_id
        assert draft.parent_span_id == target.span_id
        stages = [trace["outrider-target", name] for name in ("queue", "prefill", "decode")]
        assert {one.parent_span_id for one in stages} == {target.span_id}
        assert stages[1].end_time_unix_nano == stages[2].start_time_unix_nano
        assert stages[2].end_time_unix_nano > stages[2].start_time_unix_nano
        assert values(gateway)["http.response.status_code"] == 200
        assert values(gateway)["gen_ai.usage.output_tokens"] == 24
        assert values(target)["gen_ai.usage.output_tokens"] == 24
        told = reply.json()["speculation"]
        assert values(target)["outrider.rounds"] == told["rounds"]
        assert values(target)["outrider.accepted_tokens"] == told["accepted_tokens"] > 0
        assert len(trace) == 6, "a span per service and stage, not per round"
        over_grpc = found.of(GRPC_TRACE)
        assert ("outrider-gateway", "outrider.gateway.v1.Inference/Complete") in over_grpc
        assert ("outrider-target", "target.generate") in over_grpc
