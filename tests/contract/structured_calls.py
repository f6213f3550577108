"""Tests of structured output, from a client's view. They need a target that enforces constraints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import grpc
import httpx
import openai
import pytest
from gateway_thread import Stack
from http_calls import openai_client
from pydantic import BaseModel

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

CHAT: list[Any] = [{"role": "user", "content": "List 3 countries and their capitals."}]
MODES = ({"mode": "off"}, {"mode": "on", "depth": 4, "topk": 2, "max_nodes": 9})
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "rank": {"enum": [1, 2, 3]},
        "coast": {"type": "boolean"},
    },
    "required": ["name", "rank", "coast"],
    "additionalProperties": False,
}
EBNF = 'root ::= "capital: " word\nword ::= [A-Z] [a-z]+ "."'


class City(BaseModel, extra="forbid"):
    """A city."""

    capital: bool
    rank: Literal[1, 2]


@pytest.fixture
def structured(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai_client(stack, 60) as client:
        yield client


def texts_of(stack: Stack, path: str, body: dict[str, Any], **field: Any) -> list[Any]:
    """Return the replies with speculation off and on."""
    replies = []
    for mode in MODES:
        answer = httpx.post(f"{stack.base_url}{path}", json=body | field | {"speculation": mode}, timeout=60)
        assert answer.status_code == 200, answer.text
        replies.append(answer.json())
    return replies


def is_city(text: str) -> bool:
    """Return whether a text matches `CITY`."""
    found = json.loads(text)
    return (
        list(found) == ["name", "rank", "coast"]
        and found["rank"] in (1, 2, 3)
        and isinstance(found["coast"], bool)
    )


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_a_schema_holds_with_and_without_speculation(structured: openai.OpenAI, temperature: float) -> None:
    found = []
    for mode in MODES:
        choice = structured.chat.completions.create(
            model="target",
            messages=CHAT,
            max_tokens=120,
            temperature=temperature,
            seed=3,
            n=2,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
            extra_body={"speculation": mode},
        ).choices
        assert [one.finish_reason for one in choice] == ["stop", "stop"]
        found.append([one.message.content for one in choice])
    assert found[0] == found[1]
    assert all(is_city(text) for text in found[0])


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"structured_outputs": {"json": CITY}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["Paris", "Lima"]}}, "Paris|Lima"),
        ({"structured_outputs": {"grammar": EBNF}}, r"capital: [A-Z][a-z]+\."),
        ({"guided_json": json.dumps(CITY)}, r"\{.*\}"),
        ({"guided_regex": "x[yz]+w"}, "x[yz]+w"),
        ({"guided_choice": ["sí", "no"]}, "sí|no"),
        ({"guided_grammar": 'start: "a" | "b"'}, "[ab]"),
        ({"json_schema": CITY}, r"\{.*\}"),
        ({"regex": "(ab)+c"}, "(ab)+c"),
        ({"ebnf": EBNF}, r"capital: [A-Z][a-z]+\."),
    ],
)
def test_the_fields_of_vllm_and_sglang_hold(stack: Stack, field: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 80}
    off, on = (reply["choices"][0] for reply in texts_of(stack, "/v1/completions", body, **field))
    assert off["text"] == on["text"]
    if off["finish_reason"] == "stop":
        assert re.fullmatch(pattern, off["text"])


def test_generate_takes_the_fields_of_sglang(stack: Stack) -> None:
    parameters = {"temperature": 0, "max_new_tokens": 60, "json_schema": json.dumps(CITY)}
    off, on = texts_of(stack, "/generate", {"text": "A city:"}, sampling_params=parameters)
    assert off["text"] == on["text"]
    assert is_city(off["text"])


def test_the_parse_helper_returns_the_model(structured: openai.OpenAI) -> None:
    reply = structured.chat.completions.parse(
        model="target", messages=CHAT, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(reply.choices[0].message.parsed, City)
    parsed = structured.responses.parse(
        model="target", input="A city", text_format=City, temperature=0, max_output_tokens=60
    )
    assert isinstance(parsed.output_parsed, City)


def test_messages_take_an_output_format(stack: Stack) -> None:
    body = {"model": "target", "max_tokens": 80, "messages": CHAT, "temperature": 0}
    config = {"format": {"type": "json_schema", "schema": CITY}}
    off, on = texts_of(stack, "/v1/messages", body, output_config=config)
    assert off["content"] == on["content"]
    assert is_city(off["content"][0]["text"])


def test_grpc_takes_a_constraint(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        request = gateway_pb2.CompleteRequest(
            text="A city:",
            options=gateway_pb2.GenerationOptions(
                max_tokens=80, constraint=common_pb2.Constraint(json_schema=json.dumps(CITY))
            ),
        )
        replies = list(gateway_pb2_grpc.InferenceStub(channel).Complete(request, timeout=60))
    assert is_city("".join(reply.chunk.text for reply in replies))


@pytest.mark.parametrize(
    ("field", "name", "part"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema", "uniqueItems"),
        ({"ebnf": "root ::= missing"}, "ebnf", "missing"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_name_of_the_field(
    stack: Stack, field: dict[str, Any], name: str, part: str
) -> None:
    answer = httpx.post(f"{stack.base_url}/v1/completions", json={"prompt": "x"} | field, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "save"}}], ids=str)
def test_a_tool_call_can_be_forced(structured: openai.OpenAI, choice: Any) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "save", "parameters": CITY}}]
    for mode in MODES:
        reply = structured.chat.completions.create(
            model="target",
            messages=CHAT,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=120,
            extra_body={"speculation": mode},
        ).choices[0]
        (call,) = reply.message.tool_calls or ()
        assert (call.function.name, reply.finish_reason) == ("save", "tool_calls")
        assert is_city(call.function.arguments)
    free = structured.chat.completions.create(model="target", messages=CHAT, tools=tools, max_tokens=8)
    assert free.choices[0].message.role == "assistant"
