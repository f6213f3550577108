"""Large bodies: parsed once, refused unread if they cannot fit, and limited alike in REST and gRPC."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of, error_of

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

LARGE = 100_000


def test_a_large_body_is_parsed_once(gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    loads = json.loads

    def counting(text: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(text))
        return loads(text, *args, **options)

    body = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "x" * LARGE})
    monkeypatch.setattr(json, "loads", counting)
    with client_of(gateway) as client:
        reply = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert sizes.count(len(body)) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "1" * LARGE}]}),
        ("/v1/completions", {"prompt": "1" * LARGE}),
        ("/generate", {"text": "1" * LARGE}),
        ("/tokenize", {"prompt": "1" * LARGE}),
        ("/detokenize", {"tokens": [5] * LARGE}),
    ],
)
def test_what_cannot_fit_is_refused(gateway: GatewayThread, path: str, body: dict[str, Any]) -> None:
    with client_of(gateway) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert error_of(reply)["code"] == "context_length_exceeded"


def test_grpc_takes_no_larger_body_than_rest(gateway: GatewayThread) -> None:
    limit = gateway.server.core.settings.max_body_bytes
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Complete(gateway_pb2.CompleteRequest(text="1" * limit))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
