"""The log line of a request: tokens, time to the first token, accept length, and why it failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import client_of
from structlog.testing import capture_logs

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc


def _lines(fake: FakeTarget, tokenizer_dir: Path, body: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the lines of one request. The gateway logs a request before it has drained."""
    with capture_logs() as lines:
        gateway = GatewayThread(target=fake.address, tokenizer=tokenizer_dir)
        try:
            gateway.wait_ready()
            with client_of(gateway) as client:
                client.post(path, json=body)
        finally:
            gateway.close()
    return [dict(line) for line in lines if line["event"] == "request"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_tells_what_was_generated(fake: FakeTarget, tokenizer_dir: Path, stream: bool) -> None:
    body = {"prompt": [9, 10, 11], "max_tokens": 4, "stream": stream}
    [line] = _lines(fake, tokenizer_dir, body, "/v1/completions")
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish"]) == (3, 4, "length")
    assert 0 < line["ttft_ms"] <= line["elapsed_ms"]
    assert "error" not in line


def test_a_line_tells_why_a_request_failed(fake: FakeTarget, tokenizer_dir: Path) -> None:
    [line] = _lines(fake, tokenizer_dir, {"prompt": [9] * 10_000}, "/v1/completions")
    assert (line["status"], line["error"], line["field"]) == (400, "context_length_exceeded", "prompt")


def test_more_sequences_than_can_wait_are_the_clients_error(fake: FakeTarget, tokenizer_dir: Path) -> None:
    """Before, this was a 429 with Retry-After on an idle server, each time."""
    [line] = _lines(fake, tokenizer_dir, {"prompt": [[9]] * 64, "n": 16}, "/v1/completions")
    assert (line["status"], line["field"]) == (400, "n")


def test_grpc_requests_have_lines_too(fake: FakeTarget, tokenizer_dir: Path) -> None:
    with capture_logs() as lines:
        gateway = GatewayThread(target=fake.address, tokenizer=tokenizer_dir)
        try:
            gateway.wait_ready()
            with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
                request = gateway_pb2.CompleteRequest(text="hello")
                request.options.max_tokens = 3
                list(gateway_pb2_grpc.InferenceStub(channel).Complete(request))
        finally:
            gateway.close()
    [line] = [line for line in lines if line["event"] == "request"]
    assert (line["method"], line["completion_tokens"]) == ("gRPC", 3)
