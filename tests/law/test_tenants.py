"""Requests that priorities or other tenants push out of their slots emit the same tokens as undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
    oracle_plan,
)
from support.models.toys import make_toy_target
from support.suite.compute_device import DEVICE

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SamplingParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
NEW_TOKENS = 24
SHAPE = (3, 2, 7)
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3)]
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=21)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)
    )


def host_drafts(decoder: Decoder, answers: list[list[int]], **limits: int) -> Harness:
    return make_harness(decoder, FakeDrafter(oracle_plan(answers, VOCAB, 0.7)), **limits)


def rounds_ahead(decoder: Decoder, answers: list[list[int]], **limits: int) -> Harness:
    drafter = AnswerDrafter(answers, VOCAB, 0.7)
    return make_harness(decoder, drafter, plan=AHEAD, graphs=GraphCache(DEVICE, False), **limits)


def send_as(harness: Harness, tenant: str) -> None:
    """Make all further requests those of a tenant."""
    submit = harness.engine.submit
    harness.engine.submit = lambda request, sink: submit(replace(request, tenant=tenant), sink)  # type: ignore[method-assign]


@pytest.mark.parametrize("make", [host_drafts, rounds_ahead])
@pytest.mark.parametrize(("tenant", "priority"), [("", 5), ("late", 0)])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_late_requests_take_slots_without_changing_a_token(
    decoder: Decoder, make: Callable[..., Harness], tenant: str, priority: int, sampling: SamplingParams
) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(6)]
    plain = [
        generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS, sampling=sampling) for prompt in prompts
    ]
    answers = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    harness = make(decoder, answers, num_pages=80, page_size=8, max_running=3)
    early, others = range(3), range(3, 6)
    for index in early:
        harness.submit(prompts[index], NEW_TOKENS, request_id=str(index), sampling=sampling, shape=SHAPE)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.num_retractions == 0
    send_as(harness, tenant)
    for index in others:
        harness.submit(
            prompts[index],
            NEW_TOKENS,
            request_id=str(index),
            sampling=sampling,
            shape=SHAPE,
            priority=priority,
        )
    harness.step()
    assert harness.scheduler.num_retractions >= 1, "a late request must not wait for the end of an early one"
    harness.run()
    assert not harness.sink.failed
    for index, prompt in enumerate(prompts):
        assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)], sampling)
        assert harness.sink.finished[str(index)].completion_tokens == NEW_TOKENS
