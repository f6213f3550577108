"""Refused and failed requests over REST and gRPC: the list of errors agrees with the metric."""

from __future__ import annotations

import re
from collections import Counter

import grpc
import httpx
import pytest
from fake_target import MAX_MODEL_LEN, FakeTarget, Script
from http_calls import CHAT, TIMEOUT_S, MakeGateway, client_of

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.shared.base.errors import OutriderError

LONG = [9] * (MAX_MODEL_LEN + 1)
TURN = [{"role": "user", "content": "x " * MAX_MODEL_LEN}]
TOO_LONG = [
    (CHAT, {"messages": TURN}),
    (CHAT, {"messages": TURN, "stream": True}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": LONG, "stream": True}),
    ("/v1/messages", {"model": "toy", "messages": TURN, "max_tokens": 4}),
    ("/v1/messages", {"model": "toy", "messages": TURN, "max_tokens": 4, "stream": True}),
    ("/v1/responses", {"input": TURN[0]["content"]}),
    ("/v1/responses", {"input": TURN[0]["content"], "stream": True}),
    ("/generate", {"input_ids": LONG}),
    ("/generate", {"input_ids": LONG, "stream": True}),
]


def counts(http: httpx.Client) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of errors by reason: those of the list of errors, and those of the metric."""
    listed: Counter[str] = Counter()
    for one in http.get("/status.json").json()["errors"]:
        listed[one["reason"]] += one["count"]
    text = http.get("/metrics").text
    found = re.findall(
        r'^outrider_request_failures_total{model="\w*",reason="(\w+)"} (\S+)$', text, re.MULTILINE
    )
    return listed, sum((Counter({reason: int(float(count))}) for reason, count in found), Counter())


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
def test_a_prompt_that_is_too_long_counts_once(make_gateway: MakeGateway, path: str, body: dict) -> None:
    with client_of(make_gateway()) as http:
        assert http.post(path, json=body).status_code == 400
        assert counts(http) == ({"context_length_exceeded": 1}, {"context_length_exceeded": 1})


def test_every_stage_that_refuses_is_counted(make_gateway: MakeGateway, fake: FakeTarget) -> None:
    fake.script = lambda request: Script([[9]], error=OutriderError("lost", reason="nan_logits"))
    with client_of(make_gateway(api_key=("right",))) as http:
        assert http.get("/v1/models").status_code == 401
        http.headers["Authorization"] = "Bearer right"
        answers = [
            http.get("/nope"),
            http.get(CHAT),
            http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}),
            http.post("/generate", content=b"{", headers={"Content-Type": "application/json"}),
            http.post(CHAT, json={"messages": []}),
            http.post("/v1/completions", json={"prompt": [9], "n": 3}),
        ]
        assert [one.status_code for one in answers] == [404, 405, 415, 400, 400, 500]
        streamed = http.post("/v1/completions", json={"prompt": [9], "stream": True, "ignore_eos": True})
        assert "nan_logits" in streamed.text
        listed, counted = counts(http)
    reasons = ("invalid_api_key", "not_found", "method_not_allowed", "unsupported_media_type")
    assert listed == counted
    assert all(counted[one] == 1 for one in (*reasons, "malformed_json", "invalid_value"))
    assert counted["nan_logits"] == 2


def test_calls_over_grpc_are_counted_with_their_method(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(api_key=("right",))
    key = ("authorization", "Bearer right")
    long = gateway_pb2.CompleteRequest(token_ids=gateway_pb2.TokenIds(ids=LONG))
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel, client_of(gateway) as http:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        http.headers["Authorization"] = "Bearer right"
        with pytest.raises(grpc.RpcError):
            list(stub.Complete(long, timeout=TIMEOUT_S))
        with pytest.raises(grpc.RpcError):
            list(stub.Complete(long, timeout=TIMEOUT_S, metadata=(key, ("x-request-id", "mine"))))
        with pytest.raises(grpc.RpcError):
            stub.Abort(gateway_pb2.AbortRequest(), timeout=TIMEOUT_S, metadata=(key,))
        listed, counted = counts(http)
        errors = http.get("/status.json").json()["errors"]
    assert listed == counted == {"invalid_api_key": 1, "context_length_exceeded": 1, "invalid_value": 1}
    assert [one["route"].rpartition("/")[2] for one in errors] == ["Abort", "Complete", "Complete"]
    assert [one["status"] for one in errors] == [400, 400, 401]
    assert errors[1]["request_id"] == "mine"
