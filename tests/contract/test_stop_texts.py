"""What a stop string or stop token leaves in the reply: its own text, and tool calls that it cuts off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_target import EOS_ID, FakeTarget, Script
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of
from tokenizers import Tokenizer
from tool_chat import CALL, TWO_CALLS, WEATHER, answer_with

COMPLETIONS = "/v1/completions"
TEXT = "one two!"  # The last token occurs only there.
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def http(tool_gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(tool_gateway) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def ask(http: httpx.Client, request: pytest.FixtureRequest) -> Ask:
    """Return a function that asks for a completion, and returns its choice with the whole text."""

    def choice_of(**fields: Any) -> dict[str, Any]:
        body = {"prompt": "x", "max_tokens": 50, "return_token_ids": True, **fields}
        if not request.param:
            return dict(http.post(COMPLETIONS, json=body).json()["choices"][0])
        lines = http.post(COMPLETIONS, json={**body, "stream": True}).text.split("\n\n")
        found = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        text = "".join(one["text"] for one in found)
        return {
            **found[-1],
            "text": text,
            "token_ids": [t for one in found for t in one.get("token_ids", [])],
        }

    return choice_of


@pytest.mark.parametrize("step", [1, 2, 40])
def test_the_stop_token_is_part_of_the_text_on_request(
    fake: FakeTarget, ask: Ask, tokenizer: Tokenizer, step: int
) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    fake.script = lambda request: Script([ids[at : at + step] for at in range(0, len(ids), step)])
    stop = ids[-1]
    for fields, text in (
        ({}, TEXT[:-1]),
        ({"include_stop_str_in_output": True}, TEXT),
        ({"no_stop_trim": True}, TEXT),
    ):
        choice = ask(stop_token_ids=[stop], **fields)
        assert (choice["text"], choice["token_ids"], choice["matched_stop"]) == (text, ids, stop)
        assert choice["finish_reason"] == "stop"


def test_the_end_of_the_sequence_has_no_text(fake: FakeTarget, ask: Ask, tokenizer: Tokenizer) -> None:
    answer_with(fake, tokenizer, "one two")
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert ask(**shown)["text"] == "one two"
    # Here, the client names this token as a stop token.
    named = ask(**shown, stop_token_ids=[EOS_ID])
    assert (named["text"], named["matched_stop"]) == ("one two" + tokenizer.id_to_token(EOS_ID), EOS_ID)


def finish_of(http: httpx.Client, stop: str) -> dict[str, Any]:
    """Return the reasons why the answers of three kinds of requests ended."""
    turns = [{"role": "user", "content": "x"}]
    chat = {"messages": turns, "tools": [WEATHER], "stop": stop}
    whole = http.post(CHAT, json=chat).json()["choices"][0]
    lines = http.post(CHAT, json={**chat, "stream": True}).text.split("\n\n")
    last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]["choices"][0]
    function = WEATHER["function"]
    assert isinstance(function, dict)
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    body = {"model": "toy", "max_tokens": 199, "messages": turns, "tools": [tool], "stop_sequences": [stop]}
    message = http.post("/v1/messages", json=body).json()
    return {
        "chat": whole["finish_reason"],
        "stream": last["finish_reason"],
        "messages": (message["stop_reason"], message["stop_sequence"]),
        "calls": len(whole["message"].get("tool_calls") or []),
    }


@pytest.mark.parametrize("stop", ["Par", 'is"'])
def test_a_call_that_a_stop_string_cuts_off_is_no_reason_to_call(
    fake: FakeTarget, http: httpx.Client, tokenizer: Tokenizer, stop: str
) -> None:
    answer_with(fake, tokenizer, CALL)
    assert finish_of(http, stop) == {
        "chat": "stop",
        "stream": "stop",
        "messages": ("stop_sequence", stop),
        "calls": 1,
    }


@pytest.mark.parametrize(("text", "calls"), [(f"{CALL} END", 1), (f"{TWO_CALLS} END", 2)])
def test_complete_calls_before_a_stop_string_count(
    fake: FakeTarget, http: httpx.Client, tokenizer: Tokenizer, text: str, calls: int
) -> None:
    answer_with(fake, tokenizer, text)
    assert finish_of(http, "END") == {
        "chat": "tool_calls",
        "stream": "tool_calls",
        "messages": ("tool_use", None),
        "calls": calls,
    }
