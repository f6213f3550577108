"""The real `anthropic` client against ``/v1/messages``: text, tools, thinking, streams, counts and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from tokenizers import Tokenizer
from tool_chat import CALL, TWO_CALLS, WEATHER, answer_with, prompt_of

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
FUNCTION: Any = WEATHER["function"]
TOOLS: list[Any] = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
]


def client_of(gateway: GatewayThread, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.stack.base_url, api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def client(tool_gateway: GatewayThread) -> Iterator[anthropic.Anthropic]:
    with client_of(tool_gateway) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    asked = {"model": "toy", "messages": MESSAGES, "max_tokens": 200}
    return client.messages.create(**asked | fields)


def test_text_in_text_out(client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer) -> None:
    answer_with(fake, tokenizer, "18 degrees.")
    message = ask(client, system=[{"type": "text", "text": "Be brief."}])
    assert [(block.type, block.text) for block in message.content] == [("text", "18 degrees.")]
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", "toy")
    assert message.usage.output_tokens == len(tokenizer.encode("18 degrees.").ids) + 1
    assert prompt_of(fake, tokenizer) == "<|bos|><|system|>Be brief.<|user|>Weather in Paris?<|assistant|>"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message.model_dump()


@pytest.mark.parametrize("content", ["It has ", [{"type": "text", "text": "It has\n"}]], ids=str)
def test_the_answer_continues_a_last_message_of_the_assistant(
    client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer, content: Any
) -> None:
    answer_with(fake, tokenizer, " 18 degrees.")
    turns = [*MESSAGES, {"role": "assistant", "content": content}]
    message = ask(client, messages=turns)
    assert [block.text for block in message.content] == [" 18 degrees."]
    prompt = "<|bos|><|user|>Weather in Paris?<|assistant|>It has"
    assert prompt_of(fake, tokenizer) == prompt
    counted = client.messages.count_tokens(model="toy", messages=turns)
    assert counted.input_tokens == len(fake.seen[-1].prompt_ids)


def test_an_empty_last_message_of_the_assistant_begins_a_new_answer(
    client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "Mild.")
    assert ask(client, messages=[*MESSAGES, {"role": "assistant", "content": " "}]).content[0].text == "Mild."
    assert prompt_of(fake, tokenizer) == "<|bos|><|user|>Weather in Paris?<|assistant|>"


def test_a_whole_agent_turn(client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer) -> None:
    answer_with(fake, tokenizer, f"<think>Hm.</think>{TWO_CALLS}")
    first = ask(client, tools=TOOLS, thinking={"type": "adaptive"})
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Paris"}, {"city": "Lima"}]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "18"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "20"}]},
        {"type": "text", "text": "And?"},
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    answer_with(fake, tokenizer, "Mild.")
    assert ask(client, messages=turns, tools=TOOLS, max_tokens=99).content[0].text == "Mild."
    prompt = prompt_of(fake, tokenizer)
    assert prompt.count("<tool_call>") == 2
    assert prompt.endswith("<|tool|>18<|tool|>20<|user|>And?<|assistant|>")


@pytest.mark.parametrize("text", ["Just text.", CALL, f"<think>Hm.</think>{TWO_CALLS}"])
def test_the_events_build_the_same_message(
    client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer, text: str
) -> None:
    answer_with(fake, tokenizer, text)
    fields: dict[str, Any] = {"tools": TOOLS, "thinking": {"type": "adaptive"}}
    whole = ask(client, **fields)
    with client.messages.stream(model="toy", messages=MESSAGES, max_tokens=200, **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    for streamed, block in zip(final.content, whole.content, strict=True):
        for name in ("text", "thinking", "input"):
            assert getattr(streamed, name, None) == getattr(block, name, None)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_thinking_is_shown_only_if_asked_for(
    client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "<think>Hm.</think>Yes.")
    assert [block.type for block in ask(client).content] == ["text"]


def test_one_call_at_most_and_no_calls(
    client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    one = ask(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    assert ask(client, tools=TOOLS, tool_choice={"type": "none"}).content[0].text == TWO_CALLS


def test_the_reason_of_the_end(client: anthropic.Anthropic, fake: FakeTarget, tokenizer: Tokenizer) -> None:
    answer_with(fake, tokenizer, "one two three")
    cut = ask(client, stop_sequences=["two"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "two", "one ")
    assert ask(client, max_tokens=1).stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_billed(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="toy", messages=MESSAGES, tools=TOOLS, system="Be brief.")
    message = ask(client, tools=TOOLS, system="Be brief.", max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "unknown"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_raised_as_the_client_knows_them(
    client: anthropic.Anthropic, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises((anthropic.BadRequestError, anthropic.NotFoundError)) as caught:
        ask(client, stream=stream, **fields)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["param"]) == ("error", param)


def test_the_key_of_anthropics_clients_is_accepted(make_gateway: Callable[..., GatewayThread]) -> None:
    gateway = make_gateway(api_key=("right",))
    with client_of(gateway, "right") as client:
        assert ask(client, max_tokens=1).type == "message"
    with client_of(gateway, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
        ask(client)
    assert httpx.get(f"{gateway.stack.base_url}/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("POST", "/v1/messages", {"x-api-key": "wrong"}, 401, "authentication_error"),
        ("GET", "/v1/messages", {"x-api-key": "right"}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {"x-api-key": "right"}, 404, "not_found_error"),
    ],
)
def test_errors_before_the_route_have_anthropics_form_too(
    make_gateway: Callable[..., GatewayThread],
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
    kind: str,
) -> None:
    gateway = make_gateway(api_key=("right",))
    url = f"{gateway.stack.base_url}{path}"
    reply = httpx.request(method, url, headers=headers, json={} if method == "POST" else None)
    assert reply.status_code == status
    assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", kind)
