"""Token ids of the prompt in replies, where clients of vLLM and SGLang read them; and `extra_key`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of, error_of
from tokenizers import Tokenizer

COMPLETIONS = "/v1/completions"
TURNS = [{"role": "user", "content": "The quick"}]


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(gateway) as client:
        yield client


def ask(http: httpx.Client, path: str, **fields: Any) -> Any:
    """Return the reply, or the list of chunks of a stream."""
    body = {"messages": TURNS} if path == CHAT else {"prompt": ["The quick", "fox"]}
    response = http.post(path, json={**body, "max_tokens": 4, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids"])
def test_a_chat_has_the_ids_of_its_prompt(http: httpx.Client, fake: FakeTarget, field: str) -> None:
    reply = ask(http, CHAT, n=2, **{field: True})
    prompt = list(fake.seen[-1].prompt_ids)
    assert reply["prompt_token_ids"] == prompt
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [prompt, prompt]
    assert ("token_ids" in reply["choices"][0]) is (field == "return_token_ids")
    chunks = ask(http, CHAT, stream=True, **{field: True})
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt


@pytest.mark.parametrize("echo", [False, True])
def test_each_completion_has_the_ids_of_its_prompt(
    http: httpx.Client, tokenizer: Tokenizer, echo: bool
) -> None:
    prompts = [tokenizer.encode(text).ids for text in ("The quick", "fox")]
    reply = ask(http, COMPLETIONS, return_token_ids=True, echo=echo)
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == prompts
    assert "prompt_token_ids" not in reply
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in ask(http, COMPLETIONS, return_token_ids=True, echo=echo, stream=True):
        assert "prompt_token_ids" not in chunk
        for choice in chunk["choices"]:
            found[choice["index"]].append(choice.get("prompt_token_ids"))
    for index, prompt in enumerate(prompts):
        assert found[index] == [prompt] + [None] * (len(found[index]) - 1)


def test_generate_has_the_ids_of_its_prompt(http: httpx.Client) -> None:
    body = {"input_ids": [5, 6, 7], "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 2}}
    assert http.post("/generate", json=body).json()["prompt_token_ids"] == [5, 6, 7]
    lines = http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [event.get("prompt_token_ids") for event in events[-2:]] == [None, [5, 6, 7]]


def test_no_ids_are_returned_unasked(http: httpx.Client) -> None:
    assert "prompt_token_ids" not in json.dumps([ask(http, path) for path in (CHAT, COMPLETIONS)])


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids", "add_special_tokens"])
def test_responses_refuse_what_they_would_lack(http: httpx.Client, field: str) -> None:
    response = http.post("/v1/responses", json={"input": "x", field: True})
    assert (response.status_code, error_of(response)["param"]) == (400, field)


def test_extra_key_separates_prefixes_as_cache_salt_does(http: httpx.Client, fake: FakeTarget) -> None:
    ask(http, CHAT, extra_key="mine")
    assert fake.seen[-1].cache_salt == "mine"
    native = {"text": "x", "sampling_params": {"max_new_tokens": 1}, "extra_key": "yours"}
    assert http.post("/generate", json=native).status_code == 200
    assert fake.seen[-1].cache_salt == "yours"
    both = http.post(CHAT, json={"messages": TURNS, "extra_key": "a", "cache_salt": "b"})
    assert error_of(both)["param"] == "cache_salt"
