"""Options of gRPC chats and completions make the same prompts as those of REST."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of
from support.models.toy_text import make_tokenizer
from tokenizers import Tokenizer
from tool_chat import CALL, HERMES, WEATHER, answer_with

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

TIMEOUT_S = 20
TEMPLATE = "{{ enable_thinking }}{{ reasoning_effort }}" + HERMES
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}, {"role": "assistant", "content": "It is"}]
FUNCTION: Any = WEATHER["function"]
TOOL = gateway_pb2.Tool(
    name=FUNCTION["name"],
    description=FUNCTION["description"],
    parameters=json.dumps(FUNCTION["parameters"]),
)


@pytest.fixture(scope="module")
def verbose_gateway(
    shared_fake: FakeTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayThread]:
    """A gateway whose chat template writes its variables into the prompt."""
    folder = make_tokenizer(tmp_path_factory.mktemp("verbose"), TEMPLATE)
    gateway = GatewayThread(target=shared_fake.address, tokenizer=folder)
    gateway.wait_ready()
    yield gateway
    gateway.close()


@pytest.fixture
def http(verbose_gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(verbose_gateway) as client:
        yield client


@pytest.fixture
def stub(verbose_gateway: GatewayThread) -> Iterator[gateway_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(verbose_gateway.stack.grpc_address) as channel:
        yield gateway_pb2_grpc.InferenceStub(channel)


def messages() -> list[gateway_pb2.Message]:
    return [gateway_pb2.Message(**message) for message in MESSAGES]


Prompt = gateway_pb2.ChatPrompt
Options = gateway_pb2.GenerationOptions


@pytest.mark.parametrize(
    ("rest", "rpc"),
    [
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"prompt": Prompt(template_kwargs='{"enable_thinking": false}')},
        ),
        ({"reasoning_effort": "high"}, {"prompt": Prompt(reasoning_effort="high")}),
        ({"add_generation_prompt": False}, {"prompt": Prompt(add_generation_prompt=False)}),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            {"prompt": Prompt(add_generation_prompt=False, continue_final_message=True)},
        ),
        ({"add_special_tokens": True}, {"prompt": Prompt(add_special_tokens=True)}),
        ({"truncate_prompt_tokens": 4}, {"options": Options(truncate_prompt_tokens=4)}),
        ({"truncate_prompt_tokens": -1}, {"options": Options(truncate_prompt_tokens=-1)}),
        ({"tools": [WEATHER]}, {"tools": [TOOL]}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "none"}),
    ],
)
def test_a_chat_has_the_same_prompt(
    http: httpx.Client,
    stub: gateway_pb2_grpc.InferenceStub,
    fake: FakeTarget,
    rest: dict[str, Any],
    rpc: dict[str, Any],
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **rest}
    assert http.post(CHAT, json=body).status_code == 200
    request = gateway_pb2.ChatRequest(messages=messages(), **rpc)
    request.options.max_tokens = 1
    list(stub.Chat(request, timeout=TIMEOUT_S))
    first, second = fake.seen
    assert list(first.prompt_ids) == list(second.prompt_ids)


@pytest.mark.parametrize("special", [True, False])
def test_a_completion_has_the_same_prompt(
    http: httpx.Client, stub: gateway_pb2_grpc.InferenceStub, fake: FakeTarget, special: bool
) -> None:
    body = {"prompt": "The quick brown", "max_tokens": 1, "add_special_tokens": special}
    assert http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 2}).status_code == 200
    options = Options(max_tokens=1, truncate_prompt_tokens=2)
    request = gateway_pb2.CompleteRequest(text="The quick brown", options=options, add_special_tokens=special)
    list(stub.Complete(request, timeout=TIMEOUT_S))
    assert list(fake.seen[0].prompt_ids) == list(fake.seen[1].prompt_ids)
    assert len(fake.seen[0].prompt_ids) == 2


def test_a_chat_is_tokenized_alike(http: httpx.Client, stub: gateway_pb2_grpc.InferenceStub) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "return_token_strs": True}
    expected = http.post("/tokenize", json=body).json()
    request = gateway_pb2.TokenizeRequest(messages=messages(), tools=[TOOL], return_tokens=True)
    reply = stub.Tokenize(request, timeout=TIMEOUT_S)
    assert list(reply.token_ids) == expected["tokens"]
    assert list(reply.tokens) == expected["token_strs"]
    assert reply.max_model_len == expected["max_model_len"]


def test_reasoning_can_be_left_out(
    stub: gateway_pb2_grpc.InferenceStub, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    answer_with(fake, tokenizer, "<think>Hm.</think>18 degrees.")
    request = gateway_pb2.ChatRequest(messages=messages(), omit_reasoning=True)
    chunks = [one.chunk for one in stub.Chat(request, timeout=TIMEOUT_S) if one.HasField("chunk")]
    assert "".join(chunk.text for chunk in chunks) == "18 degrees."
    assert not any(chunk.reasoning for chunk in chunks)
    assert sum(len(chunk.token_ids) for chunk in chunks) > 8


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda one: setattr(one.prompt, "template_kwargs", "[1]"), "prompt.template_kwargs"),
        (lambda one: setattr(one.prompt, "template_kwargs", "[" * 100_000), "prompt.template_kwargs"),
        (lambda one: setattr(one.prompt, "template_kwargs", '{"x": 1}'), "chat_template_kwargs.x"),
        (lambda one: setattr(one.prompt, "reasoning_effort", "huge"), "prompt.reasoning_effort"),
        (lambda one: setattr(one.prompt, "continue_final_message", True), "continue_final_message"),
        (lambda one: setattr(one, "tool_choice", "perhaps"), "tool_choice"),
        (lambda one: setattr(one.options, "truncate_prompt_tokens", -2), "truncate_prompt_tokens"),
    ],
)
def test_wrong_options_are_named(
    stub: gateway_pb2_grpc.InferenceStub, change: Callable[[Any], None], field: str
) -> None:
    request = gateway_pb2.ChatRequest(messages=messages())
    change(request)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Chat(request, timeout=TIMEOUT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_forced_call_is_a_constraint_of_the_target(
    stub: gateway_pb2_grpc.InferenceStub, fake: FakeTarget, tokenizer: Tokenizer, choice: str
) -> None:
    answer_with(fake, tokenizer, CALL)
    request = gateway_pb2.ChatRequest(messages=messages(), tools=[TOOL], tool_choice=choice)
    assert list(stub.Chat(request, timeout=TIMEOUT_S))
    assert "get_weather" in fake.seen[-1].constraint.grammar
