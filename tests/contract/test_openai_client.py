"""The real `openai` client against the gateway: the client parses every reply and raises the right errors.

These tests make no assumptions about the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_thread import Stack
from http_calls import openai_client

MESSAGES: list[Any] = [{"role": "user", "content": "List 3 countries and their capitals."}]


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai_client(stack) as client:
        yield client


def speculation_of(reply: Any) -> dict[str, Any]:
    return reply.model_extra["speculation"]


def test_models_are_listed_and_described(client: openai.OpenAI, stack: Stack) -> None:
    listed = client.models.list()
    assert [model.id for model in listed.data] == [stack.model]
    assert client.models.retrieve(stack.model).id == stack.model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("unknown")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered(client: openai.OpenAI, stack: Stack) -> None:
    reply = client.chat.completions.create(
        model=stack.model, messages=MESSAGES, max_tokens=8, temperature=0, seed=1
    )
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.message.role, choice.index) == (
        "chat.completion",
        stack.model,
        "assistant",
        0,
    )
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert 1 <= reply.usage.completion_tokens <= 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 <= reply.usage.prompt_tokens_details.cached_tokens < reply.usage.prompt_tokens
    assert {
        "accept_length",
        "rounds",
        "draft_tokens",
        "accepted_histogram",
        "fallback_reason",
    } <= speculation_of(reply).keys()


def test_a_streamed_chat_says_the_same_in_the_form_that_clients_rely_on(
    client: openai.OpenAI, stack: Stack
) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0.7,
        "seed": 5,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *body, last = chunks
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert [chunk.choices[0].delta.role for chunk in body] == ["assistant"] + [None] * (len(body) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons == [None] * (len(body) - 1) + [whole.choices[0].finish_reason]
    # Usage is in a separate chunk after the finish, and null in all others.
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in body)
    assert all("usage" in chunk.model_fields_set for chunk in body)
    # The number of rounds may differ between runs. The text may not.
    assert speculation_of(body[-1]).keys() == speculation_of(whole).keys()
    assert speculation_of(body[-1])["rounds"] >= 1


def test_without_include_usage_no_chunk_mentions_it(client: openai.OpenAI, stack: Stack) -> None:
    chunks = list(
        client.chat.completions.create(model=stack.model, messages=MESSAGES, max_tokens=4, stream=True)
    )
    assert all("usage" not in chunk.model_fields_set and len(chunk.choices) == 1 for chunk in chunks)


async def test_the_asynchronous_client_streams_many_at_once(stack: Stack) -> None:
    import asyncio

    async with openai.AsyncOpenAI(
        base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:

        async def one(seed: int, stream: bool) -> str:
            asked: dict[str, Any] = {
                "model": stack.model,
                "messages": MESSAGES,
                "max_tokens": 16,
                "temperature": 2,
                "seed": seed,
            }
            if not stream:
                return (await client.chat.completions.create(**asked)).choices[0].message.content
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        streamed = await asyncio.gather(*(one(seed, True) for seed in range(8)))
        plain = await asyncio.gather(*(one(seed, False) for seed in range(8)))
    assert streamed == plain
    assert len(set(plain)) > 1


def test_choices_share_the_seed_and_differ(client: openai.OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "messages": MESSAGES,
        "max_tokens": 16,
        "temperature": 2,
        "seed": 3,
    }
    three = client.chat.completions.create(**asked, n=3)
    alone = client.chat.completions.create(**asked)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.choices[0].message.content == alone.choices[0].message.content
    assert len({choice.message.content for choice in three.choices}) == 3
    # The prompt is billed once, and each answer once.
    assert three.usage.prompt_tokens == alone.usage.prompt_tokens
    assert three.usage.completion_tokens > alone.usage.completion_tokens

    by_choice: dict[int, str] = {}
    finishes: dict[int, int] = {}
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        choice = chunk.choices[0]
        by_choice[choice.index] = by_choice.get(choice.index, "") + (choice.delta.content or "")
        finishes[choice.index] = finishes.get(choice.index, 0) + (choice.finish_reason is not None)
    assert by_choice == {choice.index: choice.message.content for choice in three.choices}
    assert finishes == {0: 1, 1: 1, 2: 1}


def test_completions_take_text_ids_and_batches(client: openai.OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {"model": stack.model, "max_tokens": 6, "temperature": 0, "seed": 1}
    text = client.completions.create(prompt="The capital of France", **asked)
    batch = client.completions.create(prompt=["The capital of France", "The quick"], **asked)
    assert text.object == "text_completion"
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.choices[0].text == text.choices[0].text
    ids = client.completions.create(prompt=[9, 10, 11], **asked)
    both = client.completions.create(prompt=[[9, 10, 11], [9, 10, 11]], **asked)
    assert [choice.text for choice in both.choices] == [ids.choices[0].text] * 2
    assert ids.usage.prompt_tokens == 3
    assert both.usage.prompt_tokens == 6


def test_echo_puts_the_prompt_first(client: openai.OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {"model": stack.model, "prompt": "The quick", "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "The quick" + plain
    chunks = list(client.completions.create(**asked, echo=True, stream=True))
    assert chunks[0].choices[0].text == "The quick"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "The quick" + plain


def test_a_trace_says_every_round(client: openai.OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "messages": MESSAGES,
        "max_tokens": 10,
        "temperature": 0,
        "seed": 2,
    }
    speculation = {"speculation": {"mode": "on", "depth": 3, "topk": 2, "max_nodes": 6, "trace": True}}
    whole = client.chat.completions.create(**asked, extra_body=speculation)
    trace = speculation_of(whole)["trace"]
    assert len(trace) == speculation_of(whole)["rounds"] >= 1
    for one in trace:
        assert one.keys() == {
            "round",
            "base_len",
            "nodes",
            "accepted",
            "emitted",
            "emitted_text",
            "draft_ms",
            "verify_ms",
            "reason",
        }
        assert all(isinstance(node["text"], str) for node in one["nodes"])
        assert one["nodes"][0]["parent"] == -1
        assert all(0 <= node["parent"] < at for at, node in enumerate(one["nodes"]) if at)
        assert len(one["accepted"]) < len(one["nodes"])
    chunks = list(client.chat.completions.create(**asked, extra_body=speculation, stream=True))
    streamed = [
        chunk.model_extra["speculation"]["trace"]
        for chunk in chunks
        if "trace" in (chunk.model_extra.get("speculation") or {})
    ]
    assert all(len(rounds) == 1 for rounds in streamed)
    assert [one[0]["round"] for one in streamed] == sorted({one[0]["round"] for one in streamed})
    # A late draft may cost a round, but the tokens emitted by all rounds are the same.
    # The first token comes from the prefill. The last round may emit tokens beyond the limit, which are cut.
    drafted = whole.usage.completion_tokens - 1
    assert [token for one in streamed for token in one[0]["emitted"]][:drafted] == [
        token for one in trace for token in one["emitted"]
    ][:drafted]


@pytest.mark.parametrize(
    ("change", "error", "param", "code"),
    [
        ({"model": "unknown"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": "word " * 5000}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
        ({"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias", "invalid_value"),
        ({"logit_bias": {"five": 1}}, openai.BadRequestError, "logit_bias", "invalid_value"),
        ({"presence_penalty": 2.1}, openai.BadRequestError, "presence_penalty", "invalid_value"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs", "invalid_value"),
        ({"extra_body": {"min_tokens": 5}}, openai.BadRequestError, "min_tokens", "invalid_value"),
        (
            {"extra_body": {"allowed_token_ids": []}},
            openai.BadRequestError,
            "allowed_token_ids",
            "invalid_value",
        ),
        (
            {"extra_body": {"documents": ["text"]}},
            openai.BadRequestError,
            "documents",
            "unsupported_parameter",
        ),
        (
            {"extra_body": {"speculation": {"max_nodes": 0}}},
            openai.BadRequestError,
            "speculation.max_nodes",
            "invalid_value",
        ),
        (
            {"extra_body": {"speculation": {"depth": 17}}},
            openai.BadRequestError,
            "speculation.depth",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_raised_as_the_client_knows_them(
    client: openai.OpenAI,
    stack: Stack,
    change: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    code: str,
    stream: bool,
) -> None:
    asked: dict[str, Any] = {"model": stack.model, "messages": MESSAGES, "max_tokens": 4} | change
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked, stream=stream)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_reply_can_be_sent_back_as_the_next_turn(client: openai.OpenAI, stack: Stack) -> None:
    first = client.chat.completions.create(model=stack.model, messages=MESSAGES, max_tokens=4, temperature=0)
    turns = [
        *MESSAGES,
        first.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "And 2 more?"}]},
    ]
    second = client.chat.completions.create(model=stack.model, messages=turns, max_tokens=4, temperature=0)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_replies_have_the_types_that_the_client_expects(client: openai.OpenAI, stack: Stack) -> None:
    # pydantic warns about values of another type when a reply is printed, and warnings are errors here.
    chat = client.chat.completions.create(model=stack.model, messages=MESSAGES, max_tokens=6, temperature=0)
    text = client.completions.create(model=stack.model, prompt="The quick", max_tokens=6, temperature=0)
    for reply in (chat, text):
        assert reply.model_dump()["metadata"]["seed"].isdigit()
        assert reply.to_json()
        assert reply.system_fingerprint
    for chunk in client.chat.completions.create(
        model=stack.model, messages=MESSAGES, max_tokens=6, temperature=0, stream=True
    ):
        chunk.model_dump()
    assert chat.usage.completion_tokens_details.reasoning_tokens == 0


def test_speculation_is_reported_under_the_names_of_vllm(client: openai.OpenAI, stack: Stack) -> None:
    asked: dict[str, Any] = {"model": stack.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"speculation": {"mode": "on", "depth": 3}}
    reply = client.chat.completions.create(**asked)
    report = reply.model_extra["metrics"]["speculative_decoding"]
    ours = speculation_of(reply)
    assert report["num_draft_tokens"] == ours["draft_tokens"]
    assert report["num_accepted_draft_tokens"] == ours["accepted_tokens"]
    histogram = {int(at): count for at, count in report["acceptance_histogram"].items()}
    assert sum(histogram.values()) == report["num_spec_steps"]
    assert sum(at * count for at, count in histogram.items()) == report["num_accepted_draft_tokens"]
    expected = 1 + report["num_accepted_draft_tokens"] / report["num_spec_steps"]
    assert report["mean_acceptance_length"] == pytest.approx(expected, abs=1e-5)
    assert max(histogram) <= report["num_spec_tokens"]
    last = list(client.chat.completions.create(**asked, stream=True))[-1]
    assert last.model_extra["metrics"]["speculative_decoding"].keys() == report.keys()
