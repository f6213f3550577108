"""Routed experts and hidden states of a scripted target, whose states tell the index of each token."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from fake_target import HIDDEN_SIZE, LAYERS, TOP_K, FakeTarget, Script
from gateway_thread import GatewayThread, Stack
from http_calls import openai_client
from tokenizers import Tokenizer

from outrider.target.v1 import target_pb2

PROMPT = [5, 9, 12, 7, 30]
ASKED = {"return_routed_experts": True}


def post(stack: Stack, route: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{stack.base_url}{route}", json=body, timeout=30)


def indices(encoded: str) -> list[int]:
    """Return the index of each token whose experts are in a reply."""
    rows = np.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, LAYERS, TOP_K)
    assert (rows == rows[:, :1, :1]).all()
    return [int(row[0, 0]) for row in rows]


@pytest.mark.parametrize("start", [0, 2, 5])
@pytest.mark.parametrize("hidden", [False, True])
def test_each_token_but_the_last_has_its_experts(
    stack: Stack, fake: FakeTarget, start: int, hidden: bool
) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
        "routed_experts_start_len": start,
        "return_hidden_states": hidden,
        **ASKED,
    }
    meta = post(stack, "/generate", body).json()["meta_info"]
    assert indices(meta["routed_experts"]) == list(range(start, len(PROMPT) + 5))
    assert fake.seen[-1].states.start == (0 if hidden else start), "nothing else is transferred"
    if hidden:
        prompt, *answer = meta["hidden_states"]
        assert [int(row[0]) for row in [*prompt, *answer]] == list(range(len(PROMPT) + 5))
        assert len(prompt) == len(PROMPT)
        assert answer[0] == [len(PROMPT) + column / 8 for column in range(HIDDEN_SIZE)]


def test_tokens_after_a_stop_string_have_no_states(
    stack: Stack, fake: FakeTarget, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("one two three four", add_special_tokens=False).ids
    fake.script = lambda request: Script([tokens[:1], tokens[1:]])
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 40, "stop": " tw"}, **ASKED}
    meta = post(stack, "/generate", body).json()["meta_info"]
    assert meta["completion_tokens"] < len(tokens)
    assert indices(meta["routed_experts"]) == list(range(len(PROMPT) + meta["completion_tokens"] - 1))


def test_openais_routes_return_experts_beside_each_choice(stack: Stack) -> None:
    with openai_client(stack) as client:
        reply = client.completions.create(
            model="toy",
            prompt=PROMPT,
            max_tokens=4,
            n=2,
            extra_body={**ASKED, "return_hidden_states": True, "ignore_eos": True},
        )
    for choice in reply.choices:
        assert choice.model_extra is not None
        assert indices(choice.model_extra["sgl_ext"]["routed_experts"]) == list(range(len(PROMPT) + 3))
        assert int(choice.model_extra["hidden_states"][0]) == len(PROMPT) + 2


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"stream": True}, "return_routed_experts", "does not allow stream"),
        ({"routed_experts_start_len": 6}, "return_routed_experts", "5 tokens"),
        ({"routed_experts_start_len": -1}, "routed_experts_start_len", "0"),
        ({"sampling_params": {"max_new_tokens": 400}}, "return_routed_experts", "--max-state-bytes"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    make_gateway: Callable[..., GatewayThread], body: dict[str, Any], field: str, message: str
) -> None:
    stack = make_gateway(max_state_bytes=404 * LAYERS * TOP_K * 4 - 1).stack
    answer = post(stack, "/generate", {"input_ids": PROMPT, **ASKED, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert message in answer.json()["error"]["message"]
    fits = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 399}, **ASKED}
    assert post(stack, "/generate", fits).status_code == 200


def test_an_older_target_is_not_asked(
    make_gateway: Callable[..., GatewayThread], tokenizer: Tokenizer
) -> None:
    old = FakeTarget(tokenizer.get_vocab_size())
    old.features = [target_pb2.TARGET_FEATURE_RESUME]
    old.start()
    try:
        stack = make_gateway(target=old.address).stack
        for body in ({"return_hidden_states": True}, {"return_logprob": True, "token_ids_logprob": [4]}):
            answer = post(stack, "/generate", {"input_ids": PROMPT, **body})
            assert answer.status_code == 400
            assert "newer target" in answer.json()["error"]["message"]
        assert not old.seen
    finally:
        old.stop()
