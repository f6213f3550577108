"""Parallel tool calls of every format arrive in each API, in streams as in whole replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of, openai_client
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from tool_chat import WEATHER, answer_with, make_tool_tokenizer

BEGIN, ONE, SEP, END, DONE = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
PARIS, LIMA = '{"city": "Paris"}', '{"city": "Lima"}'
NAME = "get_weather"
HARMONY_CALL = f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"
FORMATS = {
    "hermes": f'<tool_call>{{"name": "{NAME}", "arguments": {PARIS}}}</tool_call>\n'
    f'<tool_call>{{"name": "{NAME}", "arguments": {LIMA}}}</tool_call>',
    "llama3-json": f'{{"name": "{NAME}", "parameters": {PARIS}}}; {{"name": "{NAME}", "parameters": {LIMA}}}',
    "pythonic": f"[{NAME}(city='Paris'), {NAME}(city='Lima')]",
    "mistral": f"[TOOL_CALLS]{NAME}[ARGS]{PARIS}[TOOL_CALLS]{NAME}[ARGS]{LIMA}",
    "deepseek-v3": f"{BEGIN}{ONE}{NAME}{SEP}{PARIS}{END}{ONE}{NAME}{SEP}{LIMA}{END}{DONE}",
    "harmony": f"{HARMONY_CALL}{PARIS}<|call|><|start|>assistant{HARMONY_CALL}{LIMA}<|call|>",
}
TURNS: list[Any] = [{"role": "user", "content": "Weather?"}]
ServeFormat = Callable[[str, str, int], GatewayThread]


@pytest.fixture
def serve_format(
    make_gateway: Callable[..., GatewayThread], fake: FakeTarget, tokenizer: Tokenizer, tmp_path: Path
) -> ServeFormat:
    """Return a function that serves a format of calls, and scripts an answer of `step` tokens at a time."""

    def serve(parser: str, text: str, step: int) -> GatewayThread:
        answer_with(fake, tokenizer, text, step)
        return make_gateway(tokenizer=make_tool_tokenizer(tmp_path), tool_call_parser=parser)

    return serve


def joined(events: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the calls of a chat stream, joined by their index as clients do it."""
    calls: dict[int, dict[str, str]] = {}
    for event in events:
        for part in event["choices"][0]["delta"].get("tool_calls") or []:
            call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            if "id" in part:
                call["id"] = part["id"]
            for name, text in part["function"].items():
                call[name] += text
    return [calls[index] for index in sorted(calls)]


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json={**body, "stream": True}).text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("parser", FORMATS)
def test_two_calls_arrive_in_chats(serve_format: ServeFormat, parser: str, step: int) -> None:
    body = {"messages": TURNS, "tools": [WEATHER]}
    with client_of(serve_format(parser, FORMATS[parser], step)) as http:
        whole = http.post(CHAT, json=body).json()
        events = events_of(http, CHAT, body)
    ChatCompletion.model_validate(whole)
    for event in events:
        ChatCompletionChunk.model_validate(event)
    calls = joined(events)
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        (NAME, {"city": "Paris"}),
        (NAME, {"city": "Lima"}),
    ]
    assert len({call["id"] for call in calls}) == 2
    message = whole["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        call["arguments"] for call in calls
    ]
    assert not message["content"]
    assert not any(event["choices"][0]["delta"].get("content") for event in events)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("parser", FORMATS)
def test_two_calls_arrive_in_responses(serve_format: ServeFormat, parser: str) -> None:
    gateway = serve_format(parser, FORMATS[parser], 3)
    body = {"input": "Weather?", "tools": [{"type": "function", **WEATHER["function"]}]}  # type: ignore[dict-item]
    with client_of(gateway) as http:
        events = events_of(http, "/v1/responses", body)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    with openai_client(gateway.stack) as client, client.responses.stream(model="toy", **body) as stream:
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Lima"}]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [
        0,
        1,
    ]


@pytest.mark.parametrize("parser", FORMATS)
def test_two_calls_arrive_in_messages(serve_format: ServeFormat, parser: str) -> None:
    gateway = serve_format(parser, FORMATS[parser], 3)
    function: Any = WEATHER["function"]
    tool: Any = {"name": NAME, "input_schema": function["parameters"]}
    asked: dict[str, Any] = {"model": "toy", "max_tokens": 300, "messages": TURNS, "tools": [tool]}
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    with client_of(gateway) as http:
        for event in events_of(http, "/v1/messages", asked):
            adapter.validate_python(event)
        whole = http.post("/v1/messages", json=asked).json()
    Message.model_validate(whole)
    client = anthropic.Anthropic(base_url=gateway.stack.base_url, api_key="none", max_retries=0)
    with client, client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for content in (whole["content"], [block.model_dump() for block in final.content]):
        assert [(block["type"], block["input"]) for block in content] == [
            ("tool_use", {"city": "Paris"}),
            ("tool_use", {"city": "Lima"}),
        ]
    assert (final.stop_reason, whole["stop_reason"]) == ("tool_use", "tool_use")


def test_text_after_a_call_is_a_block_of_its_own(serve_format: ServeFormat) -> None:
    text = f'Wait. <tool_call>{{"name": "{NAME}", "arguments": {PARIS}}}</tool_call>Done.'
    gateway = serve_format("hermes", text, 3)
    function: Any = WEATHER["function"]
    tool: Any = {"name": NAME, "input_schema": function["parameters"]}
    asked: dict[str, Any] = {"model": "toy", "max_tokens": 300, "messages": TURNS, "tools": [tool]}
    client = anthropic.Anthropic(base_url=gateway.stack.base_url, api_key="none", max_retries=0)
    with client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    for message in (whole, final):
        assert [block.type for block in message.content] == ["text", "tool_use", "text"]
        assert [block.text for block in message.content if block.type == "text"] == ["Wait.", "Done."]
