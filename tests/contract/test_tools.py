"""Tools and reasoning in chats, with the openai client: history, prompt, calls in replies and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import openai_client
from pydantic import BaseModel
from tokenizers import Tokenizer
from tool_chat import CALL, TWO_CALLS, WEATHER, answer_with, make_tool_tokenizer, prompt_of

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TOOLS: list[Any] = [WEATHER]


@pytest.fixture
def client(tool_gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai_client(tool_gateway.stack) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "toy", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    return client.chat.completions.create(**asked | fields)


def test_a_call_is_a_typed_part_of_the_reply(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, CALL)
    choice = chat(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")
    assert '"name": "get_weather"' in prompt_of(fake, tokenizer)


def test_a_stream_has_the_deltas_that_clients_join(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    chunks = list(chat(client, stream=True))
    assert all(chunk.choices[0].delta.role in (None, "assistant") for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    heads = [piece for piece in pieces if piece.id]
    assert [(head.index, head.function.name, head.function.arguments) for head in heads] == [
        (0, "get_weather", ""),
        (1, "get_weather", ""),
    ]
    for index, city in enumerate(("Paris", "Lima")):
        text = "".join(piece.function.arguments for piece in pieces if piece.index == index)
        assert json.loads(text) == {"city": city}
    # Arguments arrive before the call is complete.
    assert sum(piece.index == 0 for piece in pieces) > 3


def test_the_clients_own_stream_helper_joins_the_calls(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    with client.chat.completions.stream(model="toy", messages=MESSAGES, tools=TOOLS) as stream:
        done = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert done == ["get_weather", "get_weather"]
    final.model_dump()
    calls = final.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "Lima"]


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


def test_the_clients_parse_helper_returns_typed_arguments(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    reply = client.chat.completions.parse(model="toy", messages=MESSAGES, tools=[tool])
    calls = reply.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [
        GetWeather(city="Paris"),
        GetWeather(city="Lima"),
    ]


async def test_the_asynchronous_client_gets_calls_too(
    tool_gateway: GatewayThread, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, CALL)
    url = f"{tool_gateway.stack.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
        async with client.chat.completions.stream(model="toy", messages=MESSAGES, tools=TOOLS) as stream:
            streamed = await stream.get_final_completion()
    reply.model_dump()
    assert reply.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"


def test_one_call_at_most_without_parallel_calls(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    message = chat(client, parallel_tool_calls=False).choices[0].message
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris"]


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_the_markup_is_text(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, choice: str | None
) -> None:
    answer_with(fake, tokenizer, CALL)
    reply = chat(client, tool_choice=choice) if choice else chat(client, tools=openai.NOT_GIVEN)
    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    assert "get_weather" not in prompt_of(fake, tokenizer)


def test_a_call_cut_off_by_the_length_ends_with_length(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, CALL)
    tokens = len(tokenizer.encode(CALL).ids) - 8
    choice = chat(client, max_tokens=tokens).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_the_results_of_calls_reach_the_template(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, CALL)
    first = chat(client).choices[0].message
    call = first.tool_calls[0]
    first.content = None
    turns = [
        {"role": "developer", "content": "Be brief."},
        *MESSAGES,
        first.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "18 degrees"}]},
    ]
    answer_with(fake, tokenizer, "Mild.")
    assert chat(client, messages=turns).choices[0].message.content == "Mild."
    prompt = prompt_of(fake, tokenizer)
    assert "<|system|>Be brief." in prompt
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert prompt.endswith("<|tool|>18 degrees<|assistant|>")


def test_reasoning_is_apart_from_the_answer(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "<think>\nHm, Paris.\n</think>\n\n18 degrees.")
    reply = chat(client)
    message = reply.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("18 degrees.", "Hm, Paris.")
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas) == "Hm, Paris."
    assert "".join(delta.content or "" for delta in deltas) == "18 degrees."
    assert chunks[-1].usage == reply.usage
    whole = chat(client, extra_body={"separate_reasoning": False}).choices[0].message
    assert whole.content == "<think>\nHm, Paris.\n</think>\n\n18 degrees."
    without = chat(client, extra_body={"include_reasoning": False}).choices[0].message
    assert without.content == "18 degrees."
    assert "reasoning_content" not in without.model_extra


def test_a_model_without_a_known_format_refuses_tools(gateway: GatewayThread, fake: FakeTarget) -> None:
    with openai_client(gateway.stack) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            chat(client)
        assert caught.value.param == "tools"
        assert chat(client, tool_choice="none", max_tokens=2).choices[0].message.content
    assert len(fake.seen) == 1


def test_several_choices_have_calls_of_their_own(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, CALL)
    choices = chat(client, n=2).choices
    ids = {choice.message.tool_calls[0].id for choice in choices}
    assert len(ids) == 2
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in chat(client, n=2, stream=True):
        choice = chunk.choices[0]
        for piece in choice.delta.tool_calls or ():
            streamed[choice.index] += piece.function.arguments
    assert {index: json.loads(text) for index, text in streamed.items()} == {
        0: {"city": "Paris"},
        1: {"city": "Paris"},
    }


def test_settings_choose_the_parser(
    shared_fake: FakeTarget, fake: FakeTarget, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = make_tool_tokenizer(tmp_path)
    settings = {"tool_call_parser": "llama3-json", "reasoning_parser": "none"}
    gateway = GatewayThread(target=shared_fake.address, tokenizer=folder, **settings)
    try:
        gateway.wait_ready()
        answer_with(fake, tokenizer, '{"name": "get_weather", "parameters": {"city": "Lima"}}')
        with openai_client(gateway.stack) as client:
            message = chat(client).choices[0].message
        assert message.content is None
        assert message.tool_calls[0].function.arguments == '{"city": "Lima"}'
    finally:
        gateway.close()


def test_grpc_has_tools_reasoning_and_several_answers(
    tool_gateway: GatewayThread, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, f"<think>Hm.</think>{CALL}")
    function: Any = WEATHER["function"]
    request = gateway_pb2.ChatRequest(
        messages=[
            gateway_pb2.Message(role="user", content="Weather?"),
            gateway_pb2.Message(
                role="assistant",
                tool_calls=[gateway_pb2.ToolCall(id="a", name="get_weather", arguments='{"city": "Lima"}')],
            ),
            gateway_pb2.Message(role="tool", content="20", tool_call_id="a"),
        ],
        tools=[gateway_pb2.Tool(name="get_weather", parameters=json.dumps(function["parameters"]))],
        options=gateway_pb2.GenerationOptions(n=2, sampling=common_pb2.SamplingOptions(temperature=0)),
    )
    with grpc.insecure_channel(tool_gateway.stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        replies = list(stub.Chat(request, timeout=20))
        request.tools[0].parameters = "no json"
        with pytest.raises(grpc.RpcError, match=r"tools\.0"):
            list(stub.Chat(request, timeout=20))
        ids = stub.Tokenize(gateway_pb2.TokenizeRequest(text="The quick"), timeout=20).token_ids
        text = stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=ids), timeout=20).text
        assert stub.Abort(gateway_pb2.AbortRequest(rid="nobody"), timeout=20).aborted == 0
    assert text == "The quick"
    chunks = [reply.chunk for reply in replies if reply.HasField("chunk")]
    ends = [reply.finished.index for reply in replies if reply.HasField("finished")]
    assert sorted(ends) == [0, 1]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.reasoning for chunk in own) == "Hm."
        assert "".join(chunk.text for chunk in own) == "Let me see."
        calls = [chunk.tool_call for chunk in own if chunk.HasField("tool_call")]
        assert calls[0].name == "get_weather"
        assert json.loads("".join(call.arguments for call in calls)) == {"city": "Paris"}
    assert prompt_of(fake, tokenizer).endswith(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Lima"}}</tool_call><|tool|>20<|assistant|>'
    )


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_a_forced_call_is_a_constraint_of_the_target(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer, choice: Any
) -> None:
    answer_with(fake, tokenizer, CALL)
    other = {"type": "function", "function": {"name": "other"}}
    assert chat(client, tools=[*TOOLS, other], tool_choice=choice).choices[0].message.tool_calls
    constraint = fake.seen[-1].constraint
    assert constraint.WhichOneof("source") == "grammar"
    assert "<tool_call>" in constraint.grammar
    assert ("other" in constraint.grammar) == (choice == "required")
    assert (constraint.opening, constraint.begins_after) == ("<think>", "</think>")


def test_a_schema_beside_tools_allows_calls_too(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, CALL)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["blue"]}}}
    assert chat(client, response_format=form).choices[0].message.tool_calls
    constraint = fake.seen[-1].constraint
    assert "start: calls | answer" in constraint.grammar
    assert "blue" in constraint.grammar
    assert constraint.field == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"regex": "a"}}, "regex"),
        ({"extra_body": {"regex": "a", "ebnf": "b"}}, "ebnf"),
    ],
)
def test_constraints_that_exclude_each_other_are_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param


def test_reasoning_that_is_not_split_has_the_form_too(
    client: openai.OpenAI, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "{}")
    for split in (True, False):
        body = {"separate_reasoning": split}
        chat(client, tools=[], response_format={"type": "json_object"}, extra_body=body)
        assert fake.seen[-1].constraint.begins_after == ("</think>" if split else "")


def test_a_target_that_cannot_enforce_a_form_gets_no_such_request(
    shared_fake: FakeTarget, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_fake, "features", [])
    folder = make_tool_tokenizer(tmp_path_factory.mktemp("old"))
    gateway = GatewayThread(target=shared_fake.address, tokenizer=folder)
    gateway.wait_ready()
    body = {"model": "toy", "messages": MESSAGES, "response_format": {"type": "json_object"}}
    try:
        answer = httpx.post(f"{gateway.stack.base_url}/v1/chat/completions", json=body, timeout=30)
    finally:
        gateway.close()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
