"""Large bodies: parsed once, refused unread if they cannot fit, and limited alike in REST and gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.guards import json_body

LARGE = 100_000


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_large_body_is_parsed_once(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any]
) -> None:
    sizes = []

    def counting(parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(text: Any, *args: Any, **options: Any) -> Any:
            sizes.append(len(text))
            return parse(text, *args, **options)

        return counted

    body = json.dumps({**prompt, "max_tokens": 1, "metadata": {"note": "x" * LARGE}})
    for module, name in ((json, "loads"), (json_body, "from_json")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    with client_of(gateway) as client:
        reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert sizes.count(len(body)) == 1


MESSAGES = [{"role": "user", "content": "1" * LARGE}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": MESSAGES}, "messages"),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 4}, "messages"),
        ("/v1/responses", {"input": "1" * LARGE}, "input"),
        ("/v1/responses/input_tokens", {"input": "1" * LARGE}, "input"),
        ("/v1/messages", {"model": "toy", "messages": MESSAGES, "max_tokens": 1}, "messages"),
        ("/v1/messages/count_tokens", {"model": "toy", "messages": MESSAGES}, "messages"),
        ("/v1/completions", {"prompt": "1" * LARGE}, "prompt"),
        ("/generate", {"text": "1" * LARGE}, "text"),
        ("/tokenize", {"prompt": "1" * LARGE}, "prompt"),
        ("/tokenize", {"prompt": ["1", "1" * LARGE]}, "prompt"),
        ("/tokenize", {"messages": MESSAGES}, "messages"),
        ("/detokenize", {"tokens": [5] * LARGE}, "tokens"),
        ("/detokenize", {"tokens": [[5], [5] * LARGE]}, "tokens"),
    ],
)
def test_what_cannot_fit_is_refused(
    gateway: GatewayThread, path: str, body: dict[str, Any], field: str
) -> None:
    with client_of(gateway) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)


def test_grpc_takes_no_larger_body_than_rest(gateway: GatewayThread) -> None:
    limit = gateway.server.core.settings.max_body_bytes
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Complete(gateway_pb2.CompleteRequest(text="1" * limit))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpc_refuses_what_cannot_fit(gateway: GatewayThread) -> None:
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError, match="cannot fit") as text:
            stub.Tokenize(gateway_pb2.TokenizeRequest(text="1" * LARGE))
        with pytest.raises(grpc.RpcError, match="token_ids has 100000 token ids") as ids:
            stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[5] * LARGE))
    assert text.value.code() is ids.value.code() is grpc.StatusCode.INVALID_ARGUMENT
