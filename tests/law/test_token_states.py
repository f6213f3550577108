"""Hidden states, routed experts and logprobs of named tokens: the same with and without speculation.

The oracle is one pass over the prompt and the whole answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.played_graphs import BoundedGraphs
from support.engine.target_harness import (
    Harness,
    assert_same_tokens,
    generate_plain,
    hidden_of,
    load_toy,
    make_harness,
    next_logits,
)
from support.models.family_models import save
from support.models.toys import make_toy_target
from support.suite.compute_device import DEVICE, ON_GPU

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model import step_runner
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.packed_batch import WIDTHS, SamplingMode
from outrider.services.target.model.rounds import PendingVerify, Round
from outrider.services.target.model.token_states import sparse_layers
from outrider.services.target.model.verify_pass import PassResult, PassSize
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.base.token_states import NO_STATES, StateParams, TokenStates
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.routes import recording_routes, stack_routes

torch.set_num_threads(1)
NEW_TOKENS = 20
SHAPES = ((5, 1, 6), (3, 2, 7), (5, 4, 21))
MODES = (SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF)
HIDDEN = StateParams(hidden_states=True)
NAMED = LogprobParams(top=1, prompt_top=0, token_ids=(9, 0, 31, 9))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("dense"), vocab_size=48, seed=4, num_layers=3))


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model with experts, whose layer 1 or layer 0 has none."""
    return load_toy(save(request.param, tmp_path_factory.mktemp("sparse")))


@cache
def prompt_of(number: int, vocab: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(vocab) for _ in range(rng.randint(3, 37)))


def hidden_rows(states: list[TokenStates], size: int) -> np.ndarray:
    return np.frombuffer(b"".join(one.hidden_states for one in states), "<f4").reshape(-1, size)


def expert_rows(states: list[TokenStates], decoder: Decoder) -> np.ndarray:
    experts = decoder.config.experts
    assert experts is not None
    rows = np.frombuffer(b"".join(one.routed_experts for one in states), "<i4")
    return rows.reshape(-1, decoder.config.num_layers, experts.routing.top_k)


def check(
    harness: Harness, decoder: Decoder, name: str, prompt: tuple[int, ...], wanted: StateParams
) -> None:
    """Assert that a request has the states of one pass over its prompt and answer."""
    states = harness.sink.states.get(name, [])
    tokens = [*prompt, *harness.sink.tokens[name]][:-1]
    if not wanted.wanted:
        assert not states
        return
    assert [one.first for one in states] == [wanted.start, *[one.stop for one in states[:-1]]]
    assert states[-1].stop == len(tokens), "each token but the last has states"
    with recording_routes() as routes:
        hidden = hidden_of(decoder, tokens)
    if wanted.hidden_states:
        found = hidden_rows(states, decoder.config.hidden_size)
        np.testing.assert_allclose(found, hidden.cpu()[wanted.start :], atol=1e-3, rtol=1e-3)
    if wanted.routed_experts:
        chosen = stack_routes(routes, sparse_layers(decoder), decoder.config.num_layers).cpu().numpy()
        assert np.array_equal(np.sort(expert_rows(states, decoder)), np.sort(chosen[wanted.start :]))


def check_named(harness: Harness, decoder: Decoder, name: str, prompt: tuple[int, ...]) -> None:
    """Assert that the named tokens have their logprobs of one pass over the request's prompt and answer."""
    found = harness.sink.tokens[name]
    raw = next_logits(decoder, [*prompt, *found]).log_softmax(-1)[:-1, list(NAMED.token_ids)]
    scored = [*harness.sink.prompt_logprobs[name], *harness.sink.logprobs[name]]
    assert len(scored) == len(prompt) + len(found) - 1
    requested = torch.tensor([one.requested for one in scored])
    torch.testing.assert_close(requested, raw, atol=1e-3, rtol=0)


def crowd(
    decoder: Decoder,
    params: list[StateParams],
    lookahead: int,
    graphs: GraphCache | None,
    seed: int,
    **limits: int,
) -> tuple[Harness, list[tuple[int, ...]]]:
    """Run requests with different states, modes and trees in the same rounds."""
    rng, vocab = random.Random(seed), decoder.config.vocab_size
    prompts = [prompt_of(10 * seed + index, vocab) for index in range(len(params))]
    samplings = [SamplingParams(temperature=float(index % 2), seed=index) for index in range(len(params))]
    answers = [
        generate_plain(decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    harness = make_harness(
        decoder,
        AnswerDrafter(known, vocab, 0.8, device=decoder.device, checked=graphs is None),
        plan=LoopPlan(lookahead, drafts_on_device=True, max_depth=5, max_nodes=21),
        graphs=graphs,
        page_size=8,
        prefill_chunk=16,
        **limits,
    )
    if graphs is not None:
        record_full_rounds(harness, graphs)
    for index, (prompt, sampling, wanted) in enumerate(zip(prompts, samplings, params, strict=True)):
        harness.submit(
            prompt,
            NEW_TOKENS,
            request_id=str(index),
            sampling=sampling,
            mode=MODES[index % 3],
            shape=rng.choice(SHAPES),
            states=wanted,
            logprobs=NAMED if index % 2 else LogprobParams(),
        )
    harness.run()
    assert not harness.sink.failed
    assert harness.engine.stats().speculation.accepted_tokens > 0
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        assert_same_tokens(decoder, prompt, answers[index], harness.sink.tokens[str(index)], sampling)
    return harness, prompts


def record_full_rounds(harness: Harness, graphs: GraphCache) -> None:
    """Record the verify pass of every round that the crowd may have with such requests."""
    runner = harness.engine.step_runner
    with graphs.keeping():
        for rows in reversed(runner.buckets):
            for width in WIDTHS:
                runner.capture(PassSize(rows, width, SamplingMode.FULL, False))


class ReplayedGraphs(GraphCache if ON_GPU else BoundedGraphs):  # type: ignore[misc]
    """Graphs that are recorded on a GPU, and played on a CPU. Counts the replays of rounds in mode `FULL`."""

    def __init__(self) -> None:
        super().__init__(*([DEVICE] if ON_GPU else [1000]))
        self.full_rounds = 0

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        self.full_rounds += isinstance(key, GraphKey) and key.mode is SamplingMode.FULL
        return super().run(key, record)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_states_of_recorded_rounds_are_those_of_one_pass(
    dense: Decoder, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, full_rounds = ReplayedGraphs(), 0
    closed = step_runner.StepRunner._closed

    def noted(self: step_runner.StepRunner, opened: PendingVerify, result: PassResult) -> Round:
        nonlocal full_rounds
        full_rounds += opened.size.mode is SamplingMode.FULL
        return closed(self, opened, result)

    monkeypatch.setattr(step_runner.StepRunner, "_closed", noted)
    params = [HIDDEN, NO_STATES, StateParams(hidden_states=True, start=2), NO_STATES, HIDDEN]
    harness, prompts = crowd(dense, params, lookahead, graphs, 1, num_pages=40, max_running=4)
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        check(harness, dense, str(index), prompt, wanted)
        if index % 2:
            check_named(harness, dense, str(index), prompt)
    assert graphs.full_rounds == full_rounds > 0, "each round with such requests is a replay"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_hidden_states_are_those_of_one_pass(dense: Decoder, lookahead: int) -> None:
    """Few pages, so that requests are also retracted and prefilled again."""
    params = [HIDDEN, NO_STATES, StateParams(hidden_states=True, start=2), HIDDEN, NO_STATES, HIDDEN]
    harness, prompts = crowd(dense, params, lookahead, None, 0, num_pages=11, max_running=4)
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        check(harness, dense, str(index), prompt, wanted)
    assert harness.scheduler.num_retractions


def test_routed_experts_are_those_of_one_pass(sparse: Decoder) -> None:
    both = StateParams(hidden_states=True, routed_experts=True)
    experts = StateParams(routed_experts=True)
    params = [both, NO_STATES, experts, StateParams(routed_experts=True, start=3), experts, NO_STATES]
    graphs = None if ON_GPU else ReplayedGraphs()  # on a GPU, experts in fp32 cannot be recorded
    harness, prompts = crowd(sparse, params, 1, graphs, 5, num_pages=40, max_running=4)
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        check(harness, sparse, str(index), prompt, wanted)
    rows = expert_rows(harness.sink.states["2"], sparse)
    dense_layers = [layer for layer in range(rows.shape[1]) if layer not in sparse_layers(sparse)]
    assert dense_layers
    assert (rows[:, dense_layers] == -1).all()
    assert (np.delete(rows, dense_layers, 1) >= 0).all()


def test_named_tokens_have_the_logprobs_of_the_raw_logits(dense: Decoder) -> None:
    harness, prompts = crowd(dense, [NO_STATES] * 6, 1, None, 3, num_pages=24, max_running=4)
    for index, prompt in enumerate(prompts):
        if index % 2:
            check_named(harness, dense, str(index), prompt)
        else:
            assert not harness.sink.prompt_logprobs[str(index)]
            assert not harness.sink.logprobs[str(index)]


def test_a_request_for_states_computes_its_whole_prompt(dense: Decoder) -> None:
    harness = make_harness(dense, NoDrafter(dense.device), page_size=8, prefill_chunk=16)
    prompt = prompt_of(1, 48) * 2
    for name, wanted in (("first", NO_STATES), ("states", HIDDEN), ("plain", NO_STATES)):
        harness.submit(prompt, 6, request_id=name, mode=SpeculationMode.OFF, states=wanted)
        harness.run()
    check(harness, dense, "states", prompt, HIDDEN)
    cached = [harness.sink.finished[name].cached_tokens for name in ("first", "states", "plain")]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
    later = StateParams(hidden_states=True, start=len(prompt) - 1)
    harness.submit(prompt, 6, request_id="later", mode=SpeculationMode.OFF, states=later)
    harness.run()
    check(harness, dense, "later", prompt, later)
    assert harness.sink.finished["later"].cached_tokens > 0


def test_a_stop_token_cuts_the_states(dense: Decoder) -> None:
    prompt = prompt_of(2, 48)
    plain = generate_plain(dense, NoDrafter(dense.device), prompt, NEW_TOKENS)
    drafter = AnswerDrafter([[*prompt, *plain]], 48, 1.0, device=dense.device)
    harness = make_harness(dense, drafter, plan=LoopPlan(1, drafts_on_device=True, max_depth=5, max_nodes=6))
    harness.submit(prompt, NEW_TOKENS, request_id="r", shape=(5, 1, 6), stop=[plain[7]], states=HIDDEN)
    harness.run()
    assert harness.sink.tokens["r"][-1] == plain[7]
    check(harness, dense, "r", prompt, HIDDEN)


def test_a_resumed_request_reports_the_states_that_are_missing(dense: Decoder) -> None:
    prompt = prompt_of(3, 48)
    plain = generate_plain(dense, NoDrafter(dense.device), prompt, NEW_TOKENS)
    drafter = AnswerDrafter([[*prompt, *plain]], 48, 1.0, device=dense.device)
    harness = make_harness(dense, drafter, plan=LoopPlan(1, drafts_on_device=True, max_depth=5, max_nodes=6))
    known = len(prompt) + 4
    missing = StateParams(hidden_states=True, start=known)
    harness.submit(prompt, NEW_TOKENS, request_id="r", shape=(5, 1, 6), resume=plain[:5], states=missing)
    harness.run()
    states = harness.sink.states["r"]
    assert (states[0].first, states[-1].stop) == (known, len(prompt) + NEW_TOKENS - 1)
    expected = hidden_of(dense, [*prompt, *plain])[known:-1].cpu()
    found = hidden_rows(states, dense.config.hidden_size)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)


def test_rounds_without_such_requests_do_no_further_work(dense: Decoder) -> None:
    harness = make_harness(dense, NoDrafter(dense.device))
    harness.submit(prompt_of(4, 48), 6, request_id="a", logprobs=LogprobParams(top=2))
    with mock.patch.object(step_runner.AcceptedPathTap, "take", side_effect=AssertionError):
        harness.run()
    assert len(harness.sink.tokens["a"]) == 6


def test_a_model_without_experts_refuses_them(dense: Decoder) -> None:
    harness = make_harness(dense, NoDrafter(dense.device))
    with pytest.raises(InvalidRequestError, match="routed experts") as caught:
        harness.submit(prompt_of(4, 48), 6, states=StateParams(routed_experts=True))
    assert caught.value.field == "return_routed_experts"
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        harness.submit(prompt_of(4, 48), 6, logprobs=LogprobParams(top=0, token_ids=(48,)))
