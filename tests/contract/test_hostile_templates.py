"""A hostile chat template fails its chats, over REST and gRPC. Everything else continues."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from http_calls import CHAT, MakeGateway, client_of, error_of
from support.models.toy_text import make_tokenizer

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.templates import renderer

# One call of a C function, which nothing but the end of its process can stop.
ENDLESS = (
    "{% set a = 'a' * 4000000 %}{% set b = ('a' * 100000) ~ 'b' ~ ('a' * 100000) %}"
    "{{ a.rfind(b) if messages }}"
)
HELLO = {"role": "user", "content": "hi"}


def test_an_endless_template_fails_its_chats_alone(
    make_gateway: MakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "RENDER_S", 1.0)
    gateway = make_gateway(tokenizer=make_tokenizer(tmp_path, ENDLESS))
    with client_of(gateway) as http, ThreadPoolExecutor(1) as pool:
        chat = pool.submit(http.post, CHAT, json={"messages": [HELLO]})
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert "takes longer than 1 s" in error_of(chat.result())["message"]
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        chat = gateway_pb2.TokenizeRequest(messages=[gateway_pb2.Message(**HELLO)])
        with pytest.raises(grpc.RpcError) as caught:
            gateway_pb2_grpc.InferenceStub(channel).Tokenize(chat)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
