"""Tests of sampling options and logprobs, from a client's view. They need a target that computes logprobs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from gateway_thread import Stack
from http_calls import openai_client

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

CHAT: list[Any] = [{"role": "user", "content": "List 3 countries and their capitals."}]
PROMPT = "The capital of France is"
MODES = ({"mode": "off"}, {"mode": "on", "depth": 3, "topk": 2, "max_nodes": 6})


@pytest.fixture
def sampled(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai_client(stack, 60) as client:
        yield client


def complete(stack: Stack, **body: Any) -> dict[str, Any]:
    """Return the reply of /v1/completions."""
    answer = httpx.post(
        f"{stack.base_url}/v1/completions", json={"prompt": PROMPT, "temperature": 0} | body, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def generate(stack: Stack, **body: Any) -> dict[str, Any]:
    """Return the reply of /generate."""
    answer = httpx.post(f"{stack.base_url}/generate", json={"text": PROMPT} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_options_mean_the_same_with_and_without_speculation(stack: Stack) -> None:
    choice = complete(stack, max_tokens=24, return_token_ids=True)["choices"][0]
    plain, word = choice["token_ids"], next(word for word in choice["text"].split() if word.isalpha())
    favourite = max(set(plain), key=plain.count)
    for options in (
        {"presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 0.3},
        {"logit_bias": {str(favourite): -100}},
        {"bad_words": [word]},
        {"allowed_token_ids": sorted({*plain} - {favourite})},
    ):
        found = [
            complete(stack, max_tokens=24, return_token_ids=True, speculation=mode, **options)["choices"][0]
            for mode in MODES
        ]
        assert found[0]["text"] == found[1]["text"], options
        assert found[0]["token_ids"] != plain, options
        if "logit_bias" in options or "allowed_token_ids" in options:
            assert favourite not in found[0]["token_ids"]
        if "bad_words" in options:
            assert word not in found[0]["text"].split()


def test_stop_strings_and_tokens_wait_for_min_tokens(stack: Stack) -> None:
    text = complete(stack, max_tokens=24)["choices"][0]["text"]
    stop = text.split()[0]
    assert complete(stack, max_tokens=24, stop=stop)["usage"]["completion_tokens"] < 12
    assert complete(stack, max_tokens=24, stop=stop, min_tokens=12)["usage"]["completion_tokens"] >= 12
    ids = complete(stack, max_tokens=24, return_token_ids=True)["choices"][0]["token_ids"]
    later = complete(stack, max_tokens=24, stop_token_ids=ids[:1], min_tokens=12, return_token_ids=True)
    assert ids[0] not in later["choices"][0]["token_ids"][:12]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_logprobs_as_the_openai_client_knows_them(
    sampled: openai.OpenAI, stack: Stack, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "messages": CHAT,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 4,
    }
    reply = sampled.chat.completions.create(**asked)
    text = reply.choices[0].message.content
    content = reply.choices[0].logprobs.content
    if stream:
        chunks = list(sampled.chat.completions.create(**asked, stream=True))
        streamed = [one for chunk in chunks for one in (chunk.choices[0].logprobs or _Nothing).content]
        assert [one.token for one in streamed] == [one.token for one in content]
        content = streamed
    assert len(content) == reply.usage.completion_tokens
    assert bytes(byte for one in content for byte in one.bytes).decode().startswith(text)
    for one in content:
        assert len(one.top_logprobs) == 4
        assert one.top_logprobs[0].token == one.token, "a greedy answer has the most likely tokens"
        assert one.top_logprobs[0].logprob == one.logprob <= 0
        assert sum(math.exp(each.logprob) for each in one.top_logprobs) <= 1.0001


def test_a_response_has_the_logprobs_of_the_chat(sampled: openai.OpenAI, stack: Stack) -> None:
    chat = sampled.chat.completions.create(
        model=stack.model, messages=CHAT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    response = sampled.responses.create(
        model=stack.model,
        input=CHAT,
        max_output_tokens=12,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    expected = chat.choices[0].logprobs.content
    found = response.output[0].content[0].logprobs
    assert [one.bytes for one in found] == [one.bytes for one in expected[: len(found)]]
    assert len(found) in (len(expected), len(expected) - 1), "only a stop token has no text"
    for one, other in zip(found, expected, strict=False):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]


class _Nothing:
    content: tuple[Any, ...] = ()


def test_a_prompt_is_scored_without_new_tokens(stack: Stack) -> None:
    scored = complete(stack, max_tokens=0, echo=True, logprobs=2)
    logprobs = scored["choices"][0]["logprobs"]
    assert scored["choices"][0]["text"] == PROMPT
    assert scored["choices"][0]["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    assert len(logprobs["tokens"]) == scored["usage"]["prompt_tokens"] == len(logprobs["text_offset"])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    # The evaluation tools that score choices ask for one new token.
    more = complete(stack, max_tokens=1, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert more["tokens"][:-1] == logprobs["tokens"]
    assert more["token_logprobs"][1:-1] == pytest.approx(logprobs["token_logprobs"][1:], abs=1e-3)


def test_prompt_logprobs_have_the_form_of_vllm(stack: Stack) -> None:
    asked: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 2, "echo": True, "logprobs": 4}
    choice = complete(stack, **asked)["choices"][0]
    listed, echoed = choice["prompt_logprobs"], choice["logprobs"]
    assert listed[0] is None
    assert len(listed) == len(echoed["tokens"])
    for found, token, logprob, top in zip(
        listed[1:],
        echoed["tokens"][1:],
        echoed["token_logprobs"][1:],
        echoed["top_logprobs"][1:],
        strict=True,
    ):
        first, *others = found.values()
        assert (first["decoded_token"], first["logprob"]) == (token, logprob)
        assert first["rank"] is None or first["rank"] >= 1
        best = sorted((one for one in found.values() if one["rank"]), key=lambda one: one["rank"])[:2]
        assert [one["rank"] for one in best] == [1, 2]
        assert all(top[one["decoded_token"]] == one["logprob"] for one in best)
        assert len(others) in (1, 2)
        assert 4 <= len(top) <= 5
    only = complete(stack, max_tokens=0, prompt_logprobs=0)["choices"][0]
    assert (only["text"], only["logprobs"]) == ("", None)
    assert all(len(found) == 1 for found in only["prompt_logprobs"][1:])


def test_a_chat_has_the_logprobs_of_its_prompt_beside_its_choices(
    sampled: openai.OpenAI, stack: Stack
) -> None:
    reply = sampled.chat.completions.create(
        model=stack.model, messages=CHAT, max_tokens=2, extra_body={"prompt_logprobs": 1}
    )
    listed = reply.model_extra["prompt_logprobs"]
    assert len(listed) == reply.usage.prompt_tokens
    assert listed[0] is None
    assert all(1 <= len(found) <= 2 for found in listed[1:])
    assert reply.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs does not allow stream"):
        sampled.chat.completions.create(
            model=stack.model, messages=CHAT, stream=True, extra_body={"prompt_logprobs": 1}
        )


def test_a_streamed_completion_has_the_logprobs_of_the_whole_one(stack: Stack) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "echo": True, "logprobs": 2}
    whole = complete(stack, **asked)["choices"][0]
    parts: list[dict[str, Any]] = []
    body = {"prompt": PROMPT, "temperature": 0, "stream": True} | asked
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                parts.extend(json.loads(line.removeprefix("data: "))["choices"])
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "text_offset"):
        streamed = [one for part in parts if part["logprobs"] for one in part["logprobs"][name]]
        assert streamed == whole["logprobs"][name]


def test_tokens_of_logprobs_can_be_written_as_ids(stack: Stack) -> None:
    found = complete(stack, max_tokens=3, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = found["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_the_native_route_returns_sglangs_logprobs(stack: Stack) -> None:
    options = {"temperature": 0, "max_new_tokens": 5}
    found = generate(
        stack,
        sampling_params=options,
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = found["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == found["output_ids"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]).startswith(found["text"])
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 1
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert all(len(top) == 2 for top in (*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]))
    assert (
        generate(stack, sampling_params=options, return_logprob=True)["meta_info"]["input_token_logprobs"]
        == []
    )


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_of_a_native_batch_may_have_logprobs_of_its_own(stack: Stack, stream: bool) -> None:
    body = {
        "text": [PROMPT, "The quick", "Hello"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 3},
        "return_logprob": [True, False, True],
        "logprob_start_len": [0, -1, -1],
        "top_logprobs_num": [2, 0, 0],
    }
    if stream:
        last: dict[int, dict[str, Any]] = {}
        with httpx.stream(
            "POST", f"{stack.base_url}/generate", json=body | {"stream": True}, timeout=60
        ) as got:
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    last[event["index"]] = event["meta_info"]
        metas = [last[index] for index in range(3)]
    else:
        answer = httpx.post(f"{stack.base_url}/generate", json=body, timeout=60)
        metas = [one["meta_info"] for one in answer.json()]
    first, second, third = metas
    assert len(first["input_token_logprobs"]) == first["prompt_tokens"]
    assert all(len(top) == 2 for top in first["output_top_logprobs"])
    assert "output_token_logprobs" not in second
    assert len(third["output_token_logprobs"]) == third["completion_tokens"]
    assert third["input_token_logprobs"] == []
    assert "output_top_logprobs" not in third
    wrong = httpx.post(f"{stack.base_url}/generate", json=body | {"return_logprob": [True]}, timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "return_logprob")


def test_best_of_returns_the_most_likely_answers(stack: Stack) -> None:
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
    everyone = complete(stack, n=4, logprobs=0, **asked)["choices"]
    means = [sum(found := one["logprobs"]["token_logprobs"]) / len(found) for one in everyone]
    best = sorted(range(4), key=lambda index: -means[index])[:2]
    kept = complete(stack, n=2, best_of=4, **asked)
    assert [one["text"] for one in kept["choices"]] == [everyone[index]["text"] for index in best]
    assert [one["index"] for one in kept["choices"]] == [0, 1]
    assert kept["choices"][0]["logprobs"] is None
    assert kept["usage"]["completion_tokens"] > sum(len(one["text"]) > 0 for one in kept["choices"])


def test_grpc_offers_the_same_options(stack: Stack) -> None:
    plain = complete(stack, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]
    sampling = common_pb2.SamplingOptions(temperature=0, frequency_penalty=1.0, logit_bias={plain[0]: -100.0})
    options = gateway_pb2.GenerationOptions(
        max_tokens=8,
        sampling=sampling,
        bad_words=["capital"],
        logprobs=common_pb2.LogprobOptions(top=2, prompt_top=0),
    )
    request = gateway_pb2.CompleteRequest(text=PROMPT, options=options)
    with grpc.insecure_channel(stack.grpc_address) as channel:
        replies = list(gateway_pb2_grpc.InferenceStub(channel).Complete(request, timeout=60))
    chunks = [reply.chunk for reply in replies if reply.HasField("chunk")]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    scores = [one for chunk in chunks for one in chunk.logprobs]
    assert plain[0] not in tokens
    assert len(scores) == len(tokens)
    assert all(len(one.top_ids) == 2 for one in scores)
    prompt = [one for chunk in chunks for one in chunk.prompt_logprobs]
    assert len(prompt) == replies[-1].finished.usage.prompt_tokens - 1
