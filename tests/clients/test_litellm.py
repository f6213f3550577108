"""litellm as users call it: OpenAI's routes, vLLM's provider, Anthropic's messages, tools and errors."""

from __future__ import annotations

import json
import warnings
from typing import Any

import litellm
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from support.services.stack import Stack
from tokenizers import Tokenizer
from tool_chat import TWO_CALLS, WEATHER, answer_with

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def options(base_url: str, provider: str = "openai", model: str = "outrider-demo") -> dict[str, Any]:
    base = base_url if provider == "anthropic" else f"{base_url}/v1"
    asked = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "num_retries": 0}
    return asked | {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}


PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])


@PROVIDERS
def test_a_chat_is_answered(stack: Stack, provider: str) -> None:
    reply = litellm.completion(**options(stack.base_url, provider))
    assert reply.choices[0].message.content.startswith(ANSWER)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (12, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reply.model_dump()


@PROVIDERS
def test_a_stream_says_the_same(stack: Stack, provider: str) -> None:
    asked = options(stack.base_url, provider)
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == 12


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_schema_gives_the_answer_its_form(stack: Stack, provider: str) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    asked = options(stack.base_url, provider) | {"max_tokens": 60}
    reply = litellm.completion(**asked, response_format=form)
    assert json.loads(reply.choices[0].message.content)["size"] in ("small", "large")


async def test_the_asynchronous_client_streams(stack: Stack) -> None:
    stream = await litellm.acompletion(**options(stack.base_url), stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).startswith(ANSWER)


def test_logprobs_are_passed_on(stack: Stack) -> None:
    reply = litellm.completion(**options(stack.base_url), logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert [len(one.top_logprobs) for one in content] == [2] * 12


def test_options_of_vllm_pass_unchanged(stack: Stack) -> None:
    asked = options(stack.base_url, "hosted_vllm")
    plain = litellm.completion(**asked).choices[0].message.content
    limited = litellm.completion(**asked, extra_body={"bad_words": ["Paris"], "top_k": 5})
    assert "Paris" in plain
    assert "Paris" not in limited.choices[0].message.content


def test_text_is_completed(stack: Stack) -> None:
    asked = options(stack.base_url, "text-completion-openai") | {"prompt": "The capital of France is"}
    del asked["messages"]
    assert "Paris" in litellm.text_completion(**asked).choices[0].text


def test_responses_are_read(stack: Stack) -> None:
    asked = {"model": "openai/outrider-demo", "api_base": f"{stack.base_url}/v1", "api_key": "none"}
    response = litellm.responses(**asked, input=MESSAGES[0]["content"], max_output_tokens=32, temperature=0)
    assert response.output[0].content[0].text.startswith(ANSWER)
    events = list(litellm.responses(**asked, input="Hello", max_output_tokens=16, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


@PROVIDERS
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(
    tool_gateway: GatewayThread, fake: FakeTarget, tokenizer: Tokenizer, provider: str, stream: bool
) -> None:
    answer_with(fake, tokenizer, TWO_CALLS)
    asked = options(tool_gateway.stack.base_url, provider, "toy") | {"tools": [WEATHER], "max_tokens": 200}
    reply = litellm.completion(**asked, stream=stream)
    if stream:
        reply = litellm.stream_chunk_builder(list(reply))
    assert reply.choices[0].finish_reason == "tool_calls"
    calls = reply.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Lima"}]
    answer_with(fake, tokenizer, "Mild.")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18"} for call in calls]
    asked["messages"] = [*MESSAGES, reply.choices[0].message, *results]
    assert litellm.completion(**asked).choices[0].message.content == "Mild."


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "openai/unknown"}, litellm.NotFoundError),
        ({"logit_bias": {"5": 101}}, litellm.BadRequestError),
        ({"max_tokens": 10**6}, litellm.ContextWindowExceededError),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, litellm.ContextWindowExceededError),
        ({"messages": [{"role": "user", "content": "x " * 30_000}]}, litellm.ContextWindowExceededError),
    ],
)
def test_errors_have_the_types_of_litellm(
    stack: Stack, change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        litellm.completion(**options(stack.base_url) | change)
