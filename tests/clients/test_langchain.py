"""LangChain's ChatOpenAI: answers, streams, batches, logprobs, both of OpenAI's interfaces, and tools."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from support.services.stack import Stack
from tokenizers import Tokenizer
from tool_chat import TWO_CALLS, answer_with

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def chat_model(base_url: str, model: str = "outrider-demo", **fields: Any) -> ChatOpenAI:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "max_retries": 0, **fields}
    return ChatOpenAI(model=model, base_url=f"{base_url}/v1", api_key="none", **asked)  # type: ignore[arg-type]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"18 degrees in {city}"


@pytest.mark.parametrize("responses", [False, True])
def test_a_chat_is_answered_and_streamed(stack: Stack, responses: bool) -> None:
    model = chat_model(stack.base_url, use_responses_api=responses, stream_usage=True)
    reply = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert reply.text
    assert reply.usage_metadata["output_tokens"] == 12
    parts = list(model.stream([SystemMessage("Be brief."), HumanMessage(QUESTION)]))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.text == reply.text
    assert whole.usage_metadata["output_tokens"] == 12


async def test_batches_and_asynchronous_calls(stack: Stack) -> None:
    model = chat_model(stack.base_url)
    for replies in (model.batch([QUESTION] * 3), await model.abatch([QUESTION] * 3)):
        assert [reply.text.startswith(ANSWER) for reply in replies] == [True] * 3
    parts = [part.text async for part in model.astream(QUESTION)]
    assert "".join(parts).startswith(ANSWER)


def test_logprobs_are_in_the_metadata(stack: Stack) -> None:
    reply = chat_model(stack.base_url).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = reply.response_metadata["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * 12


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    size: Literal["small", "large"]


@pytest.mark.parametrize("responses", [False, True])
def test_structured_output_has_the_form_of_the_model(stack: Stack, responses: bool) -> None:
    """The embedded pair is a toy, so only the form of the answer is checked."""
    model = chat_model(stack.base_url, max_tokens=80, use_responses_api=responses)
    found = model.with_structured_output(City, method="json_schema").invoke("A city?")
    assert isinstance(found, City)
    assert found.size in ("small", "large")


def test_text_is_completed(stack: Stack) -> None:
    base: Any = {"base_url": f"{stack.base_url}/v1", "api_key": "none"}
    model = OpenAI(model="outrider-demo", temperature=0, max_tokens=12, **base)
    texts = model.batch(["The capital of France is", "The capital of Italy is"])
    assert "Paris" in texts[0]
    assert len(texts) == 2


def test_a_prompt_that_is_too_long_has_langchains_error(stack: Stack) -> None:
    with pytest.raises(ContextOverflowError):
        chat_model(stack.base_url).invoke("word " * 3000)
    with pytest.raises(ContextOverflowError):
        chat_model(stack.base_url).invoke("word " * 30_000)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tools(
    tool_gateway: GatewayThread, fake: FakeTarget, tokenizer: Tokenizer, responses: bool, stream: bool
) -> None:
    base_url = tool_gateway.stack.base_url
    model = chat_model(base_url, "toy", use_responses_api=responses, max_tokens=200)
    bound = model.bind_tools([get_weather])
    turns: list[Any] = [HumanMessage("Weather in Paris and Lima?")]
    answer_with(fake, tokenizer, TWO_CALLS)
    if stream:
        parts = list(bound.stream(turns))
        reply = parts[0]
        for part in parts[1:]:
            reply += part
    else:
        reply = bound.invoke(turns)
    assert [call["args"] for call in reply.tool_calls] == [{"city": "Paris"}, {"city": "Lima"}]
    assert reply.invalid_tool_calls == []
    results = [get_weather.invoke(call) for call in reply.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    answer_with(fake, tokenizer, "Mild.")
    assert bound.invoke([*turns, reply, *results]).text == "Mild."
    prompt = str(tokenizer.decode(list(fake.seen[-1].prompt_ids), skip_special_tokens=False))
    assert prompt.endswith("<|tool|>18 degrees in Paris<|tool|>18 degrees in Lima<|assistant|>")
