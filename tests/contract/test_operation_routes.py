"""Routes for operation, other methods and origins, tokenization, and the abort of requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_target import FakeTarget, Script
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of, error_of, openai_client
from support.models.toy_text import make_tokenizer
from tool_chat import WEATHER, make_tool_tokenizer

from outrider.common.v1 import common_pb2

ORIGIN = {"Origin": "https://example.com"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(gateway) as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/v1/models", "/metrics"])
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_options_names_the_methods(http: httpx.Client) -> None:
    assert http.options("/health").headers["allow"] == "GET, HEAD, OPTIONS"
    assert http.options("/flush_cache").headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert http.options("/nope").status_code == 404


def test_pages_of_other_origins_may_call_if_the_setting_allows_them(
    http: httpx.Client, make_gateway: Callable[..., GatewayThread]
) -> None:
    assert "access-control-allow-origin" not in http.get("/health", headers=ORIGIN).headers
    gateway = make_gateway(cors_origins=("https://example.com",), api_key=("right",))
    with client_of(gateway) as open_http:
        preflight = open_http.options(CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        other = open_http.options(CHAT, headers={**PREFLIGHT, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        reply = open_http.get("/v1/models", headers={**ORIGIN, "Authorization": "Bearer right"})
        assert reply.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        assert "X-Outrider-Ignored" in reply.headers["access-control-expose-headers"]


def test_requests_without_a_mode_get_the_mode_of_the_gateway(
    fake: FakeTarget, make_gateway: Callable[..., GatewayThread]
) -> None:
    asked = ({}, {"speculation": {"depth": 2}}, {"speculation": {"mode": "auto"}})
    with client_of(make_gateway(speculation_mode="off")) as http:
        for fields in asked:
            body = {"model": "toy", "prompt": [5, 6], "max_tokens": 2, **fields}
            assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/server_info").json()["speculation_mode"] == "off"
        assert http.get("/status.json").json()["gateway"]["speculation_mode"] == "off"
    assert [one.speculation.mode for one in fake.seen] == [
        common_pb2.SPECULATION_MODE_OFF,
        common_pb2.SPECULATION_MODE_OFF,
        common_pb2.SPECULATION_MODE_AUTO,
    ]


def test_the_version_and_the_documentation_are_there(http: httpx.Client) -> None:
    version = http.get("/version").json()["version"]
    assert version == http.get("/openapi.json").json()["info"]["version"]
    assert version == http.get("/server_info").json()["version"]
    assert "swagger" in http.get("/docs").text
    assert http.post("/ping").status_code == 200


def test_the_cache_can_be_flushed_with_both_methods(http: httpx.Client) -> None:
    for reply in (http.get("/flush_cache"), http.post("/flush_cache")):
        assert reply.json()["success"] is True
        assert "3 pages" in reply.json()["message"]


def test_health_generate_generates(http: httpx.Client, fake: FakeTarget) -> None:
    assert http.get("/health_generate").json() == {"status": "ok"}
    assert fake.seen[-1].max_new_tokens == 1


def endless(request: Any) -> Script:
    return Script([[9], [10]], finish=False)


@pytest.mark.parametrize(("names", "body"), [("mine", {"rid": "mine"}), (None, {"abort_all": True})])
def test_a_running_request_can_be_aborted(
    http: httpx.Client, fake: FakeTarget, names: str | None, body: dict[str, Any]
) -> None:
    fake.script = endless
    asked = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 50}}
    with http.stream("POST", "/generate", json=asked | ({"rid": names} if names else {})) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        seen = [json.loads(next(lines)[6:]) for _ in range(4)]
        assert httpx.post(f"{http.base_url}/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
        assert httpx.post(f"{http.base_url}/abort_request", json=body).json() == {"aborted": 2}
        ends = [json.loads(line[6:])["meta_info"]["finish_reason"]["type"] for line in lines]
    assert len(seen) == 4
    assert ends == ["abort", "abort"]
    assert httpx.post(f"{http.base_url}/abort_request", json={"abort_all": True}).json() == {"aborted": 0}


def test_an_aborted_stream_of_openai_ends_with_an_error(
    http: httpx.Client, gateway: GatewayThread, fake: FakeTarget
) -> None:
    fake.script = endless
    with openai_client(gateway.stack) as client:
        stream = client.completions.create(model="toy", prompt="x", stream=True, extra_body={"rid": "it"})
        next(stream)
        http.post("/abort_request", json={"rid": "it"})
        with pytest.raises(openai.APIError, match="aborted"):
            list(stream)
        stream = client.completions.create(model="toy", prompt="x", stream=True)
        next(stream)
        assert http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 1}
        with pytest.raises(openai.APIError, match="aborted"):
            list(stream)
    assert error_of(http.post("/abort_request", json={}))["param"] == "rid"


def test_an_aborted_reply_of_openai_is_an_error(http: httpx.Client, fake: FakeTarget) -> None:
    begun = threading.Event()

    def script(request: Any) -> Script:
        begun.set()
        return endless(request)

    fake.script = script
    replies: list[httpx.Response] = []
    body = {"prompt": "x", "rid": "it", "max_tokens": 9}
    caller = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{http.base_url}/v1/completions", json=body, timeout=30))
    )
    caller.start()
    assert begun.wait(20)
    assert http.post("/abort_request", json={"rid": "it"}).json() == {"aborted": 1}
    caller.join(20)
    assert (replies[0].status_code, error_of(replies[0])["code"]) == (499, "aborted")


def test_lists_give_each_prompt_its_own_parameters(http: httpx.Client, fake: FakeTarget) -> None:
    asked = {
        "input_ids": [[9, 10], [11]],
        "rid": ["a", "b"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 3, "n": 2, "temperature": 0}],
    }
    replies = http.post("/generate", json=asked).json()
    assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b-0", "b-1"]
    assert [len(reply["output_ids"]) for reply in replies] == [1, 3, 3]
    assert [list(one.prompt_ids) for one in fake.seen] == [[9, 10], [11], [11]]
    assert [one.sampling.temperature for one in fake.seen] == [1.0, 0.0, 0.0]


def test_texts_and_chats_are_tokenized_as_they_are_served(
    make_gateway: Callable[..., GatewayThread], fake: FakeTarget, tmp_path: Path
) -> None:
    with client_of(make_gateway(tokenizer=make_tool_tokenizer(tmp_path))) as http:
        chat = {"messages": [{"role": "user", "content": "The quick"}], "tools": [WEATHER]}
        http.post(CHAT, json={**chat, "max_tokens": 1})
        reply = http.post("/v1/tokenize", json={**chat, "return_token_strs": True}).json()
        assert reply["tokens"] == list(fake.seen[-1].prompt_ids)
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        one = http.post("/tokenize", json={"prompt": "The quick"}).json()
        many = http.post("/tokenize", json={"prompt": ["The quick", "dog"]}).json()
        assert many["tokens"][0] == one["tokens"]
        assert many["count"] == [len(ids) for ids in many["tokens"]]
        text = http.post("/v1/detokenize", json={"tokens": one["tokens"]}).json()
        assert text == {"prompt": "The quick", "text": "The quick"}
        texts = http.post("/detokenize", json={"tokens": many["tokens"]}).json()["text"]
        assert texts == ["The quick", "dog"]
        for body in ({}, {"prompt": "x", **chat}):
            assert error_of(http.post("/tokenize", json=body))["param"] == "prompt"


def test_a_deadline_tells_clients_not_to_retry(http: httpx.Client, fake: FakeTarget) -> None:
    fake.script = lambda request: Script([], finish=False)
    response = http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Deadline-Ms": "50"})
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert "x-should-retry" not in http.get("/nope").headers


def test_a_model_without_chat_template_says_so(
    make_gateway: Callable[..., GatewayThread], tmp_path: Path
) -> None:
    with client_of(make_gateway(tokenizer=make_tokenizer(tmp_path, template=None))) as http:
        error = error_of(http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]}))
        assert error["code"] == "no_chat_template"
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
