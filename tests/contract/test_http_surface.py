"""The REST API except generation: transport errors, fields, authentication, request ids and model names."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import CHAT, TIMEOUT_S, MakeGateway, client_of, error_of

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.app import create_app


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(gateway) as client:
        yield client


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": NaN}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/tokenize"])
def test_a_body_that_is_no_request_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_other_content_types_are_a_415(http: httpx.Client, content_type: str) -> None:
    response = http.post(CHAT, content=b"{}", headers={"Content-Type": content_type})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


def test_a_large_body_is_a_413_with_and_without_its_length(http: httpx.Client) -> None:
    large = b" " * (8 * 1024 * 1024 + 1)
    headers = {"Content-Type": "application/json"}
    assert http.post(CHAT, content=large, headers=headers).status_code == 413
    assert http.post(CHAT, content=iter([large[:1000], large[1000:]]), headers=headers).status_code == 413


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(http: httpx.Client) -> None:
    missing = http.get("/nope")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = http.get(CHAT)
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert "GET" in http.options("/docs").headers["Allow"]
    assert http.options("/openapi.json").status_code == 204
    # Cross-origin access is off by default: the reply to a browser's preflight allows no origin.
    preflight = http.options(
        CHAT, headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert (preflight.status_code, preflight.headers["allow"]) == (204, "OPTIONS, POST")
    assert "access-control-allow-origin" not in preflight.headers


def test_the_request_id_is_echoed_or_made(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    assert http.get("/nope", headers={"X-Request-Id": "mine-2"}).headers["X-Request-Id"] == "mine-2"
    made = [http.get("/health").headers["X-Request-Id"] for _ in range(2)]
    assert made[0] != made[1]
    # An id that could break a log line or a header is replaced.
    assert http.get("/health", headers={"X-Request-Id": "a" * 500}).headers["X-Request-Id"] != "a" * 500


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1e3", "9" * 30])
def test_a_malformed_deadline_is_named(http: httpx.Client, value: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Deadline-Ms": value})
    assert (response.status_code, error_of(response)["param"]) == (400, "X-Request-Deadline-Ms")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "hello", "messages"),
        ("messages", [{"role": "robot", "content": "x"}], "messages.0.role"),
        ("messages", [{"role": "user"}], "messages.0.content"),
        ("messages", [{"role": "user", "content": 5}], "messages.0.content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0"),
        ("messages", [{"role": "tool"}], "messages.0.content"),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", 5.5, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_completion_tokens", 0, "max_tokens"),
        ("temperature", 2.5, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 1.5, "min_p"),
        ("n", 0, "n"),
        ("n", 17, "n"),
        ("seed", 1 << 64, "seed"),
        ("stop", ["a"] * 33, "stop"),
        ("stop", [""], "stop"),
        ("stop", ["x" * 1025], "stop"),
        ("stop", {"a": 1}, "stop"),
        ("stop_token_ids", [10**6], "stop_token_ids"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("speculation", {"mode": "maybe"}, "speculation.mode"),
        ("speculation", {"max_nodes": 129}, "speculation.max_nodes"),
        ("speculation", {"topk": 0}, "speculation.topk"),
        ("speculation", {"width": 3}, "speculation.width"),
        ("speculation", "on", "speculation"),
        ("response_format", {"type": "yaml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema"),
        ("structured_outputs", {"choice": [""]}, "structured_outputs.choice"),
        ("structured_outputs", {"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ("guided_json", "{", "guided_json"),
        ("json_schema", "[1]", "json_schema"),
        ("regex", "a" * (256 * 1024 + 1), "regex"),
        ("tools", [{"type": "function"}], "tools.0.function"),
        ("tools", [{"type": "retrieval"}], "tools.0.type"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("tool_choice", "required", "tool_choice"),
        ("modalities", ["audio"], "modalities"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"thinking": [1]}, "chat_template_kwargs.thinking"),
        ("chat_template", "{{ messages }}", "chat_template"),
        ("best_of", 2, "best_of"),
        ("use_beam_search", True, "use_beam_search"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("continue_final_message", True, "continue_final_message"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_reaches_the_target(
    http: httpx.Client, fake: FakeTarget, field: str, value: Any, param: str
) -> None:
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert param.rsplit(".", 1)[-1] in error["message"]
    assert fake.seen == []


@pytest.mark.parametrize(
    "fields",
    [
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "safety_identifier": "x",
            "prompt_cache_key": "k",
        },
        {
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1,
            "logit_bias": {},
            "min_tokens": 0,
            "tools": [],
        },
        {
            "response_format": {"type": "text"},
            "logprobs": False,
            "top_logprobs": 0,
            "tool_choice": "none",
            "modalities": ["text"],
        },
        {
            "parallel_tool_calls": True,
            "separate_reasoning": True,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"thinking": False},
        },
        {
            "temperature": None,
            "stop": None,
            "stream": None,
            "n": None,
            "seed": None,
            "speculation": None,
            "stream_options": None,
        },
        {
            "max_tokens": 4,
            "max_completion_tokens": 4,
            "top_k": -1,
            "top_p": 1,
            "min_p": 0,
            "temperature": 0,
            "stop": "x",
            "seed": -5,
        },
    ],
)
def test_neutral_and_irrelevant_fields_pass(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post(
        CHAT, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"top_k": 1 << 31},
            "top_k must be between 1 and 2147483647, or -1 or 0 to disable it, not 2147483648.",
        ),
        ({"stop": 5}, "stop: must be a string or a list of strings."),
        ({"stop": ["a", 5]}, "stop: must be a string or a list of strings."),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
                    }
                ]
            },
            "messages.0.content.0: only text parts are supported, not 'image_url'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "Missing field: messages.0.content.0.text.",
        ),
    ],
)
def test_messages_say_what_is_allowed(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **fields})
    assert (response.status_code, error_of(response)["message"]) == (400, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"max_tokens": ' + b"9" * 5000 + b"}",
            "The body cannot be read: a number in it has too many digits.",
        ),
        (b"[" * 100_000, "The body cannot be read: it is nested too deeply."),
        (b'{"a": NaN}', "The body is not valid JSON: NaN is not a JSON value."),
        (b'{"a": "\xff"}', "The body is not valid JSON: it is not UTF-8 text."),
    ],
)
def test_an_unreadable_body_is_explained_without_the_parser(
    http: httpx.Client, body: bytes, message: str
) -> None:
    response = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, error_of(response)["message"]) == (400, message)


def test_an_empty_model_is_unknown_and_a_missing_one_the_only(
    http: httpx.Client, make_gateway: MakeGateway
) -> None:
    body = {"prompt": [9], "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    response = http.post("/v1/completions", json={**body, "model": ""})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    with client_of(make_gateway(any_model=True)) as lenient:
        assert lenient.post("/v1/completions", json={**body, "model": ""}).status_code == 200


def test_limits_that_contradict_each_other_are_refused(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "max_completion_tokens": 5}
    assert error_of(http.post(CHAT, json=body))["param"] == "max_tokens"


def test_every_route_needs_a_key_but_health_and_readiness(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(api_key=("right", "other"))
    public = set()
    with client_of(gateway) as http:
        paths = create_app(gateway.server.core).openapi()["paths"]
        assert len(paths) >= 14
        for path, operations in {**paths, "/openapi.json": {"get": {}}}.items():
            for method in operations:
                response = http.request(
                    method, path.replace("{model}", "toy"), json={} if method == "post" else None
                )
                if response.status_code == 401:
                    assert error_of(response)["code"] == "invalid_api_key"
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                else:
                    public.add(path)
        assert public == {"/health", "/ping", "/ready"}
        assert http.get("/no-such-path").status_code == 401
        for header in (
            "Bearer wrong",
            "Bearer right2",
            "Bearer",
            "Basic right",
            "right",
            "Bearer r\u00efght",
        ):
            assert (
                http.get("/v1/models", headers={"Authorization": header.encode("latin-1")}).status_code == 401
            )
        wrong = ({"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"})
        for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Basic right"}, *wrong):
            error = error_of(http.get("/v1/models", headers=headers))
            begin = "This key is not valid." if headers in wrong else "This server needs an API key."
            assert error["message"].startswith(begin), headers
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for key in ("right", "other"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert http.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


def test_grpc_needs_the_key_too_but_for_health(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(api_key=("right",))
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        right = (("authorization", "Bearer right"),)
        assert stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S, metadata=right).models
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health.status in (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )


def test_names_of_the_model(make_gateway: MakeGateway) -> None:
    body = {"prompt": [9], "max_tokens": 1}
    with client_of(make_gateway(served_model_name=("alpha", "beta"))) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["alpha", "beta"]
        assert http.post("/v1/completions", json={"model": "beta", **body}).json()["model"] == "beta"
        assert http.post("/v1/completions", json=body).json()["model"] == "alpha"
        assert (
            error_of(http.post("/v1/completions", json={"model": "toy", **body}))["code"] == "model_not_found"
        )
    with client_of(make_gateway(any_model=True)) as http:
        assert http.post("/v1/completions", json={"model": "gpt-99", **body}).json()["model"] == "gpt-99"


def test_without_a_tokenizer_ids_go_in_and_come_out(make_gateway: MakeGateway) -> None:
    with client_of(make_gateway(tokenizer=None)) as http:
        choice = http.post("/v1/completions", json={"prompt": [9, 10], "max_tokens": 3}).json()["choices"][0]
        assert (choice["text"], len(choice["token_ids"])) == ("", 3)
        streamed = http.post(
            "/v1/completions", json={"prompt": [9, 10], "max_tokens": 3, "temperature": 0, "stream": True}
        ).text
        chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        assert sum(len(chunk["choices"][0].get("token_ids", [])) for chunk in chunks) == 3
        reply = http.post(
            "/generate", json={"input_ids": [9, 10], "sampling_params": {"max_new_tokens": 3}}
        ).json()
        assert (reply["text"], len(reply["output_ids"])) == ("", 3)
        for path, body, param in (
            ("/v1/completions", {"prompt": "x"}, "prompt"),
            ("/generate", {"text": "x"}, "text"),
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ("/v1/completions", {"prompt": [9], "stop": "x"}, "stop"),
            ("/tokenize", {"prompt": "x"}, "prompt"),
        ):
            response = http.post(path, json=body)
            assert (response.status_code, error_of(response)["code"], error_of(response)["param"]) == (
                400,
                "no_tokenizer",
                param,
            )


def test_small_replies_are_not_held_back_by_the_socket(http: httpx.Client) -> None:
    # With Nagle's algorithm, every reply waits 40 ms for the client's delayed acknowledgement.
    times = []
    for _ in range(25):
        started = time.perf_counter()
        http.get("/health")
        times.append(time.perf_counter() - started)
    assert sorted(times)[len(times) // 2] < 0.03
