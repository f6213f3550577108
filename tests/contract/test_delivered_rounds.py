"""The statistics of an answer count the rounds whose tokens the client has received, and no others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_target import FakeTarget, Script
from gateway_thread import GatewayThread
from http_calls import TIMEOUT_S, MakeGateway, client_of
from target_calls import NEW_TOKENS, MakeTarget, body, gated, wait_all
from tokenizers import Tokenizer

STEP = 2


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.stack.base_url, timeout=TIMEOUT_S) as client:
        yield client


def spell(fake: FakeTarget, tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """Make the target generate `text`, and count two rounds after its end. Return the tokens by step."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    steps = [ids[:1], *(ids[at : at + STEP] for at in range(1, len(ids), STEP))]
    fake.script = lambda request: Script(steps, finish=False, overrun=2)
    return steps


def ask(http: httpx.Client, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """Return the reply of `/generate`, or the last event of its stream."""
    sampling = {"max_new_tokens": 100, **fields}
    asked = {"text": "x", "sampling_params": sampling, "speculation": {"trace": not stream}, "stream": stream}
    response = http.post("/generate", json=asked)
    if not stream:
        return dict(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return dict(json.loads(lines[-2]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [{"stop": "END"}, {"stop_regex": "E[N]D"}])
def test_a_round_after_the_end_of_the_text_is_not_counted(
    fake: FakeTarget, http: httpx.Client, tokenizer: Tokenizer, stop: dict[str, str], stream: bool
) -> None:
    spell(fake, tokenizer, "one two END")
    reply = ask(http, stream=stream, **stop)
    meta = reply["meta_info"]
    # The prefill emits the first token, and each round two.
    rounds = meta["completion_tokens"] // STEP
    assert meta["spec_verify_ct"] == rounds > 1
    assert meta["spec_num_proposed_drafts"] == 3 * rounds
    assert meta["spec_num_correct_drafts"] == rounds
    assert meta["spec_correct_drafts_histogram"] == [0, rounds]
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / rounds, rel=1e-5)
    found = reply["speculation"]
    assert (found["rounds"], found["accept_length"]) == (rounds, 2.0)
    if not stream:
        assert len(found["trace"]) == rounds


def test_openai_replies_count_the_same_rounds(
    fake: FakeTarget, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    spell(fake, tokenizer, "one two END")
    asked = {"prompt": "x", "max_tokens": 100, "stop": "END"}
    reply = http.post("/v1/completions", json=asked).json()
    rounds = reply["usage"]["completion_tokens"] // STEP
    assert reply["speculation"]["rounds"] == rounds
    assert reply["metrics"]["speculative_decoding"]["num_spec_steps"] == rounds
    assert reply["metrics"]["speculative_decoding"]["num_draft_tokens"] == 3 * rounds


def test_a_text_that_ends_with_its_first_token_has_no_rounds(
    fake: FakeTarget, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    first, *_ = spell(fake, tokenizer, "one two")
    reply = ask(http, stop=tokenizer.decode(first))
    assert reply["meta_info"]["completion_tokens"] == 1
    assert (reply["speculation"]["rounds"], reply["speculation"]["draft_tokens"]) == (0, 0)
    assert "spec_verify_ct" not in reply["meta_info"]


def test_a_target_that_does_not_report_each_round_counts_itself(
    fake: FakeTarget, http: httpx.Client, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "reports_drafts", False)
    steps = spell(fake, tokenizer, "one two END")
    rounds = ask(http, stop="END")["meta_info"]["spec_verify_ct"]
    # The target may be cancelled before it has sent all steps.
    assert 2 < rounds <= len(steps) - 1 + 2


def test_the_rounds_of_a_lost_target_count(make_gateway: MakeGateway, make_target: MakeTarget) -> None:
    gate = threading.Semaphore(3)
    targets = [make_target(), make_target()]
    for target in targets:
        target.script = gated(gate)
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        assert next(one for one in lines if len(one["output_ids"]) == 4)
        next(one for one in targets if one.seen).stop()
        gate.release(NEW_TOKENS)
        *_, last = lines
    # Each target emits one token by its prefill, and one token per round.
    assert last["meta_info"]["completion_tokens"] == NEW_TOKENS
    assert last["meta_info"]["spec_verify_ct"] == NEW_TOKENS - 2
