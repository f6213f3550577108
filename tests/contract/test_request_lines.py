"""The log line of a request: tokens, time to the first token, accept length, and why it failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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


def _grpc_lines(
    fake: FakeTarget,
    tokenizer_dir: Path,
    call: Callable[[gateway_pb2_grpc.InferenceStub], object],
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the lines of the calls over gRPC that `call` makes. They may fail."""
    with capture_logs() as lines:
        gateway = GatewayThread(target=fake.address, tokenizer=tokenizer_dir, **settings)
        try:
            gateway.wait_ready()
            with grpc.insecure_channel(gateway.stack.grpc_address) as channel, suppress(grpc.RpcError):
                call(gateway_pb2_grpc.InferenceStub(channel))
        finally:
            gateway.close()
    return [dict(line) for line in lines if line["event"] == "request"]


def _completion(**fields: Any) -> gateway_pb2.CompleteRequest:
    options = gateway_pb2.GenerationOptions(max_tokens=3, **fields)
    return gateway_pb2.CompleteRequest(text="hello", options=options)


def test_grpc_requests_have_lines_too(fake: FakeTarget, tokenizer_dir: Path) -> None:
    metadata = (("x-request-id", "mine"),)
    [line] = _grpc_lines(
        fake, tokenizer_dir, lambda stub: list(stub.Complete(_completion(), metadata=metadata))
    )
    assert (line["method"], line["completion_tokens"]) == ("gRPC", 3)
    assert line["route"] == "/outrider.gateway.v1.Inference/Complete"
    assert line["request_id"] == "mine"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda stub: list(stub.Complete(_completion(n=10_000))), "invalid_value"),
        (lambda stub: list(stub.Chat(gateway_pb2.ChatRequest())), "invalid_value"),
        (lambda stub: stub.Tokenize(gateway_pb2.TokenizeRequest(model="other")), "model_not_found"),
        (lambda stub: stub.Abort(gateway_pb2.AbortRequest()), "invalid_value"),
    ],
)
def test_a_refused_grpc_call_has_a_line_with_the_reason(
    fake: FakeTarget,
    tokenizer_dir: Path,
    call: Callable[[gateway_pb2_grpc.InferenceStub], object],
    reason: str,
) -> None:
    [line] = _grpc_lines(fake, tokenizer_dir, call)
    assert (line["method"], line["error"]) == ("gRPC", reason)
    assert line["request_id"]


def test_a_grpc_call_with_a_wrong_key_has_a_line(fake: FakeTarget, tokenizer_dir: Path) -> None:
    [line] = _grpc_lines(
        fake, tokenizer_dir, lambda stub: list(stub.Complete(_completion())), api_key=("right",)
    )
    assert line["error"] == "invalid_api_key"


def test_a_grpc_call_that_its_key_does_not_allow_has_a_line_with_the_reason(
    fake: FakeTarget, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The key is checked after the request itself, at the start of the generation."""
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[[keys]]\nname = "app"\nkey = "sk-of-the-app-0001"\n')
    [line] = _grpc_lines(
        fake,
        tokenizer_dir,
        lambda stub: list(
            stub.Complete(_completion(priority=9), metadata=(("authorization", "Bearer sk-of-the-app-0001"),))
        ),
        api_keys_file=keys,
    )
    assert (line["error"], line["field"], line["key"]) == ("permission_denied", "priority", "app")
