"""Tests of hidden states and of named tokens' logprobs, from a client's view. They need a real target."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from gateway_thread import Stack
from http_calls import openai_client
from sampling_calls import CHAT, MODES, PROMPT, complete, generate

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

GREEDY = {"temperature": 0, "max_new_tokens": 12}
STOPPED = {**GREEDY, "stop": [" "]}
FORMED = {**GREEDY, "regex": "[a-z]{3} (one|two)[0-9]+"}


@pytest.mark.parametrize(
    "sampling", [GREEDY, STOPPED, FORMED, {**GREEDY, "temperature": 1, "sampling_seed": 3}]
)
def test_hidden_states_are_the_same_with_and_without_speculation(
    stack: Stack, sampling: dict[str, Any]
) -> None:
    found = [
        generate(stack, sampling_params=sampling, return_hidden_states=True, speculation=mode)
        for mode in (*MODES, MODES[0])
    ]
    assert len({reply["text"] for reply in found}) == 1
    plain, drafted, again = [reply["meta_info"] for reply in found]
    # A short answer may be complete before its first trees have arrived.
    assert "spec_verify_ct" in drafted or plain["completion_tokens"] < 6
    assert again["cached_tokens"] == 0, "the whole prompt is computed"
    for meta in (drafted, again):
        assert [np.shape(one) for one in meta["hidden_states"]] == [
            np.shape(one) for one in plain["hidden_states"]
        ]
        for one, other in zip(meta["hidden_states"], plain["hidden_states"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-3)
    prompt, *answer = plain["hidden_states"]
    assert len(prompt) == plain["prompt_tokens"]
    assert len(answer) == plain["completion_tokens"] - 1, "the last token has no hidden states"
    assert np.abs(prompt[-1]).max() > 0


def test_a_batch_may_want_hidden_states_of_some_prompts(stack: Stack) -> None:
    body = {"text": [PROMPT, PROMPT], "sampling_params": {**GREEDY, "n": 2}}
    answer = httpx.post(
        f"{stack.base_url}/generate", json={**body, "return_hidden_states": [False, True]}, timeout=60
    )
    metas = [one["meta_info"] for one in answer.json()]
    assert ["hidden_states" in meta for meta in metas] == [False, False, True, True]
    for one, other in zip(metas[2]["hidden_states"], metas[3]["hidden_states"], strict=True):
        # Batches of different sizes round differently.
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-3)


def test_a_prompt_alone_has_hidden_states(stack: Stack) -> None:
    meta = generate(stack, sampling_params={"max_new_tokens": 0}, return_hidden_states=True)["meta_info"]
    (prompt,) = meta["hidden_states"]
    assert len(prompt) == meta["prompt_tokens"]


def test_openais_routes_return_the_last_hidden_states(stack: Stack) -> None:
    states = generate(stack, sampling_params=GREEDY, return_hidden_states=True)["meta_info"]["hidden_states"]
    choice = complete(stack, max_tokens=12, return_hidden_states=True)["choices"][0]
    np.testing.assert_allclose(choice["hidden_states"], states[-1], atol=1e-3, rtol=1e-3)
    assert "hidden_states" not in complete(stack, max_tokens=2)["choices"][0]
    with openai_client(stack) as client:
        asked: dict[str, Any] = {"model": stack.model, "messages": CHAT, "max_tokens": 4}
        reply = client.chat.completions.create(**asked, extra_body={"return_hidden_states": True})
        assert len(reply.choices[0].model_extra["hidden_states"]) == len(states[-1])
        with pytest.raises(openai.BadRequestError, match="does not allow stream") as caught:
            client.chat.completions.create(**asked, stream=True, extra_body={"return_hidden_states": True})
    assert caught.value.param == "return_hidden_states"


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"return_hidden_states": True, "stream": True}, "return_hidden_states", "stream"),
        ({"return_routed_experts": True}, "return_routed_experts", "routed experts"),
        (
            {"return_hidden_states": True, "text": "a " * 1500, "sampling_params": {"n": 16}},
            "return_hidden_states",
            "--max-state-bytes",
        ),
        ({"return_logprob": True, "token_ids_logprob": [1 << 40]}, "token_ids_logprob", "vocabulary"),
        ({"return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob", "2 lists"),
        ({"return_logprob": True, "token_ids_logprob": [1] * 257}, "token_ids_logprob", "at most 256"),
    ],
)
def test_what_cannot_be_returned_is_refused(
    stack: Stack, body: dict[str, Any], field: str, message: str
) -> None:
    answer = httpx.post(f"{stack.base_url}/generate", json={"text": PROMPT} | body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_named_tokens_have_logprobs_at_every_token(stack: Stack, stream: bool) -> None:
    found = generate(
        stack,
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
        return_text_in_logprobs=True,
    )
    ids = found["output_ids"][:3]
    asked = {
        "sampling_params": GREEDY,
        "return_logprob": True,
        "token_ids_logprob": ids,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    if stream:
        with httpx.stream(
            "POST", f"{stack.base_url}/generate", json={"text": PROMPT, "stream": True} | asked, timeout=60
        ) as lines:
            data = [line.removeprefix("data: ") for line in lines.iter_lines() if line.startswith("data: {")]
        meta = httpx.Response(200, text=data[-1]).json()["meta_info"]
    else:
        meta = generate(stack, **asked)["meta_info"]
    for kind in ("input", "output"):
        listed, tops = meta[f"{kind}_token_ids_logprobs"], found["meta_info"][f"{kind}_top_logprobs"]
        assert len(listed) == len(tops)
        matched = 0
        for one, top in zip(listed, tops, strict=True):
            if kind == "input" and top is None:
                assert one is None
                continue
            assert [[token, text] for _, token, text in one] == [[token, None] for token in ids]
            known = {token: logprob for logprob, token, _ in top}
            for logprob, token, _ in one:
                if token in known:
                    matched += 1
                    assert logprob == pytest.approx(known[token], abs=1e-3)
        assert matched


def test_grpc_streams_hidden_states(stack: Stack) -> None:
    states = generate(stack, sampling_params=GREEDY, return_hidden_states=True)["meta_info"]["hidden_states"]
    expected = np.array([*states[0], *states[1:]], dtype=np.float32)
    options = gateway_pb2.GenerationOptions(
        max_tokens=12,
        sampling=common_pb2.SamplingOptions(temperature=0),
        states=common_pb2.StateOptions(hidden_states=True, start=2),
    )
    with grpc.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        replies = list(stub.Complete(gateway_pb2.CompleteRequest(text=PROMPT, options=options), timeout=60))
        found = [one.chunk.states for one in replies if one.chunk.HasField("states")]
        options.states.routed_experts = True
        with pytest.raises(grpc.RpcError, match=r"options\.states"):
            list(stub.Complete(gateway_pb2.CompleteRequest(text=PROMPT, options=options), timeout=60))
    assert len(found) > 1
    assert [one.first for one in found] == [2, *[one.first + one.count for one in found[:-1]]]
    rows = np.frombuffer(b"".join(one.hidden_states for one in found), "<f4").reshape(-1, expected.shape[1])
    np.testing.assert_allclose(rows, expected[2:], atol=1e-3, rtol=1e-3)
