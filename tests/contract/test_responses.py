"""``/v1/responses`` with the openai client: text, tools, reasoning and the events of streams."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_target import MAX_MODEL_LEN, FakeTarget
from gateway_thread import GatewayThread
from http_calls import openai_client
from openai.types.responses import Response
from pydantic import BaseModel
from tokenizers import Tokenizer
from tool_chat import CALL, TWO_CALLS, WEATHER, answer_with, prompt_of

TOOLS: list[Any] = [{"type": "function", "strict": True, **WEATHER["function"]}]  # type: ignore[dict-item]


@pytest.fixture
def client(tool_gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai_client(tool_gateway.stack) as client:
        yield client


def test_text_in_text_out(client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer) -> None:
    answer_with(fake, tokenizer, "Paris.")
    response = client.responses.create(
        model="toy", input="Capital of France?", instructions="Be brief.", metadata={"a": "b"}, temperature=0
    )
    assert (response.output_text, response.status, response.metadata) == ("Paris.", "completed", {"a": "b"})
    assert prompt_of(fake, tokenizer) == "<|bos|><|system|>Be brief.<|user|>Capital of France?<|assistant|>"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response.model_dump()


COUNTED: list[dict[str, Any]] = [
    {"input": "Capital of France?"},
    {"input": [{"role": "user", "content": "Capital of France?"}], "instructions": "Be brief."},
    {"input": "Weather in Oslo?", "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"input": "Weather in Oslo?", "tools": TOOLS, "tool_choice": "none"},
    {"input": "Hello?", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
]


@pytest.mark.parametrize("fields", COUNTED)
def test_input_tokens_are_those_of_a_response(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    asked = {"model": "toy", **fields}
    counted = client.responses.input_tokens.count(**asked)
    assert not fake.seen
    assert counted.object == "response.input_tokens"
    answer_with(fake, tokenizer, "Paris.")
    response = client.responses.create(**asked)
    assert counted.input_tokens == response.usage.input_tokens == len(fake.seen[-1].prompt_ids)


def test_input_tokens_count_what_truncation_keeps(client: openai.OpenAI) -> None:
    def count(**fields: Any) -> int:
        given = long_conversation(6)
        return client.responses.input_tokens.count(model="toy", input=given, **fields).input_tokens

    assert count(truncation="auto") <= MAX_MODEL_LEN < count() == count(truncation="disabled")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "image_generation_call"}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ],
)
def test_input_that_cannot_be_counted_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.input_tokens.count(**{"model": "toy", "input": "x", **fields})
    assert refusal.value.param == param


LONG = "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 10


def long_conversation(turns: int) -> list[Any]:
    """Return turns that do not fit together, except for the last two."""
    items: list[Any] = []
    for number in range(turns):
        items += [
            {"role": "user", "content": f"Question {number}. {LONG}"},
            {"role": "assistant", "content": f"Answer {number}."},
        ]
    return [*items, {"role": "user", "content": "The last one."}]


@pytest.mark.parametrize("stream", [False, True])
def test_with_truncation_auto_the_oldest_turns_are_left_out(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, stream: bool
) -> None:
    answer_with(fake, tokenizer, "Paris.")
    reply: Any = client.responses.create(
        model="toy",
        instructions="Be brief.",
        input=long_conversation(6),
        truncation="auto",
        max_output_tokens=20,
        stream=stream,
    )
    response = list(reply)[-1].response if stream else reply
    assert (response.output_text, response.truncation) == ("Paris.", "auto")
    prompt = prompt_of(fake, tokenizer)
    assert prompt.startswith("<|bos|><|system|>Be brief.<|user|>Question ")
    assert prompt.endswith("<|user|>The last one.<|assistant|>")
    assert "Question 0." not in prompt
    assert "Question 5." in prompt
    # A longer conversation would not have fitted.
    length = len(fake.seen[-1].prompt_ids)
    assert response.usage.input_tokens == length
    assert length + 20 <= MAX_MODEL_LEN < length + 20 + len(tokenizer.encode(LONG).ids)


def test_with_truncation_auto_the_oldest_parallel_calls_are_left_out(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    calls = [
        {"type": "function_call", "call_id": f"c{number}", "name": "get_weather", "arguments": "{}"}
        for number in range(6)
    ]
    outputs = [
        {"type": "function_call_output", "call_id": f"c{number}", "output": f"Output {number}. {LONG}"}
        for number in range(6)
    ]
    items: Any = [{"role": "user", "content": "Weather?"}, *calls, *outputs]
    client.responses.create(model="toy", input=items, tools=TOOLS, truncation="auto", max_output_tokens=20)
    prompt = prompt_of(fake, tokenizer)
    assert "Output 0." not in prompt
    assert "Output 5." in prompt
    assert prompt.count("<tool_call>") == prompt.count("Output ")


def test_a_conversation_that_fits_stays_whole(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "Paris.")
    client.responses.create(model="toy", input=long_conversation(1), truncation="auto", max_output_tokens=20)
    assert "Question 0." in prompt_of(fake, tokenizer)


@pytest.mark.parametrize("truncation", [None, "disabled"])
def test_without_truncation_a_long_conversation_is_refused(client: openai.OpenAI, truncation: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="toy", input=long_conversation(6), truncation=truncation)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


def test_a_last_message_that_does_not_fit_is_refused(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": "Hello"}, {"role": "user", "content": LONG * 20}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="toy", input=items, truncation="auto")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


def test_an_answer_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="toy", input="The quick", max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_a_whole_agent_turn(client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer) -> None:
    answer_with(fake, tokenizer, f"<think>Hm.</think>{TWO_CALLS}")
    turns: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    first = client.responses.create(model="toy", input=turns, tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Lima"]
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    turns += [item.model_dump() for item in first.output]
    turns += [{"type": "function_call_output", "call_id": call.call_id, "output": "18"} for call in calls]
    answer_with(fake, tokenizer, "Mild.")
    second = client.responses.create(model="toy", input=turns, tools=TOOLS)
    assert second.output_text == "Mild."
    prompt = prompt_of(fake, tokenizer)
    assert prompt.count("<|assistant|>") == 2
    assert prompt.count("<tool_call>") == 2
    assert prompt.endswith("<|tool|>18<|tool|>18<|assistant|>")


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


def test_the_clients_parse_helper_returns_typed_arguments(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    chat_tool: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
    tool = {"type": "function", **chat_tool["function"]}
    response = client.responses.parse(model="toy", input="Weather?", tools=[tool])
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Lima"}]


@pytest.mark.parametrize("text", ["Just text.", f"<think>Hm.</think>{CALL}"])
def test_the_events_build_the_same_response(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, text: str
) -> None:
    answer_with(fake, tokenizer, text)
    whole = client.responses.create(model="toy", input="x", tools=TOOLS, temperature=0)
    with client.responses.stream(model="toy", input="x", tools=TOOLS, temperature=0) as stream:
        events = list(stream)
        final: Response = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    expected = [item.arguments for item in whole.output if item.type == "function_call"]
    assert "".join(arguments) == "".join(expected)
    assert final.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_response_repeats_the_form_that_was_asked_for(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, stream: bool
) -> None:
    answer_with(fake, tokenizer, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "numbers", "schema": schema, "strict": True}
    for text, expected in (
        (None, {"format": {"type": "text"}}),
        ({"format": form, "verbosity": "low"}, {"format": form, "verbosity": "low"}),
        ({"format": {"type": "json_object"}}, {"format": {"type": "json_object"}}),
    ):
        asked = {} if text is None else {"text": text}
        reply: Any = client.responses.create(model="toy", input="x", stream=stream, **asked)
        responses = [one.response for one in reply if hasattr(one, "response")] if stream else [reply]
        for response in responses:
            assert response.text.model_dump(by_alias=True, exclude_unset=True) == expected


LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("step", [1, 3, 40])
def test_the_text_has_logprobs_and_nothing_else_has(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, step: int
) -> None:
    thought, said = "<think>Hm, é.</think>", "Paris – s\u00fcß."
    answer_with(fake, tokenizer, f"{thought}\n\n{said}{CALL[12:]}", step)
    whole = client.responses.create(model="toy", input="x", tools=TOOLS, **LOGPROBS)
    with client.responses.stream(model="toy", input="x", tools=TOOLS, **LOGPROBS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    part = whole.output[1].content[0]
    assert part.text == said
    assert bytes(byte for one in part.logprobs for byte in one.bytes).decode() == said
    # The fake target's logprobs number its tokens.
    before = len(tokenizer.encode(f"{thought}\n\n", add_special_tokens=False).ids)
    places = [-before - 1.0 - index for index in range(len(part.logprobs))]
    assert [one.logprob for one in part.logprobs] == places
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    assert whole.top_logprobs == 2
    assert final.output[1].content[0].logprobs == part.logprobs
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.logprob for event in deltas for one in event.logprobs] == places
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.model_dump()


def test_logprobs_do_not_change_the_usage_and_are_absent_by_default(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, f"<think>Hm, well.</think>{TWO_CALLS}")
    plain = client.responses.create(model="toy", input="x", tools=TOOLS)
    scored = client.responses.create(model="toy", input="x", tools=TOOLS, **LOGPROBS)
    assert plain.usage == scored.usage
    assert plain.usage.output_tokens_details.reasoning_tokens > 0
    assert plain.output[1].content[0].logprobs == []
    assert scored.output[1].content[0].logprobs
    encrypted = client.responses.create(model="toy", input="x", include=["reasoning.encrypted_content"])
    assert encrypted.output[0].status == "completed"


async def test_the_asynchronous_client_streams_too(
    tool_gateway: GatewayThread, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "Paris.")
    url = f"{tool_gateway.stack.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        kinds = [
            event.type async for event in await client.responses.create(model="toy", input="x", stream=True)
        ]
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        (
            {"input": [{"type": "function_call", "name": "f", "call_id": "a", "arguments": '{"a'}]},
            "input.0.arguments",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "toy", "input": "x", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked, stream=stream)
    assert caught.value.param == param
