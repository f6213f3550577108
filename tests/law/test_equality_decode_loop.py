"""Rounds that run ahead of the host emit the same tokens as plain decoding: plain, chain and tree.

The batches change during the rounds: requests join, end, are cancelled, or are retracted.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_target
from support.outputs.traces import check_report, check_traces
from support.suite.compute_device import DEVICE, GRAPHS

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.errors import ErrorCode
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Drafter, FeatureSpec

torch.set_num_threads(1)
VOCAB = 64
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 7), (5, 4, 21)]
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_k=5, seed=(1 << 64) - 3),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05, seed=5, choice_index=2),
]
PROMPT = [5, 9, 2, 33, 7]
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=21)
PLANS = [
    LoopPlan(lookahead=lookahead, drafts_on_device=on_device, max_depth=5, max_nodes=21)
    for on_device in (False, True)
    for lookahead in (0, 1)
]
"""Drafts through the host and on the device, and reading each round before the next or one round late."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)
    )


def features_of(decoder: Decoder) -> FeatureSpec:
    return FeatureSpec(
        aux_layer_ids=(0, 1, 2), feature_size=3 * decoder.config.hidden_size, fingerprint="raw"
    )


def looped(decoder: Decoder, drafter: Drafter, graphs: bool = False, **options: object) -> Harness:
    return make_harness(decoder, drafter, plan=AHEAD, graphs=GraphCache(DEVICE, graphs), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding(decoder: Decoder, sampling: SamplingParams, graphs: bool) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60, sampling=sampling)
    harness = looped(decoder, NoDrafter(), graphs)
    for index in range(3):
        harness.submit(PROMPT, 60 - 7 * index, request_id=str(index), sampling=sampling)
    harness.run()
    for index in range(3):
        assert_same_tokens(
            decoder, PROMPT, plain[: 60 - 7 * index], harness.sink.tokens[str(index)], sampling
        )
        assert harness.sink.finished[str(index)].completion_tokens == 60 - 7 * index


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafted_alone(
    decoder: Decoder, shape: tuple[int, int, int], sampling: SamplingParams, graphs: bool
) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60, sampling=sampling)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=not graphs)
    harness = looped(decoder, drafter, graphs)
    harness.submit(PROMPT, 60, request_id="a", sampling=sampling, shape=shape)
    harness.run()
    assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["a"], sampling)
    stats = harness.engine.stats().speculation
    assert drafter.seats >= stats.draft_rounds == stats.rounds > 0, "every round must draft on the device"
    assert drafter.nodes_proposed == 0, "no tree may come through the host"
    assert stats.accepted_tokens > 0
    assert sum((k + 1) * count for k, count in enumerate(stats.histogram)) == 60 - 1 + stats.tokens_cut


def test_the_report_is_that_of_drafts_through_the_host(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 80)
    reports = []
    for plan in PLANS:
        drafter = AnswerDrafter([PROMPT + plain], VOCAB)
        harness = make_harness(decoder, drafter, plan=plan)
        harness.submit(PROMPT, 80, request_id="a", shape=(5, 4, 21))
        harness.run()
        assert (drafter.seats > 0) == plan.drafts_on_device
        reports.append(harness.sink.finished["a"].speculation)
        assert reports[-1].accepted_tokens > 0
        # The last round on the device starts before the host has read that the sequence has ended.
        assert 0 <= harness.engine.stats().rounds - reports[-1].rounds <= plan.lookahead
    for report in reports[1:]:
        assert reports[0] == replace(report, speedup_estimate=reports[0].speedup_estimate)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("captures", "graphs"), [(False, graphs) for graphs in GRAPHS] + [(True, False)])
def test_batches_that_change(decoder: Decoder, seed: int, captures: bool, graphs: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 60]))] for _ in range(12)]
    samplings = [rng.choice(SAMPLINGS) for _ in prompts]
    lengths = [rng.randrange(1, 50) for _ in prompts]
    plain = [
        generate_plain(decoder, NoDrafter(), prompt, length, sampling=sampling)
        for prompt, length, sampling in zip(prompts, lengths, samplings, strict=True)
    ]
    answers = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    drafter = AnswerDrafter(
        answers, VOCAB, 0.7, features_of(decoder) if captures else None, checked=not graphs
    )
    drafter.refuse_every = 5
    harness = looped(
        decoder,
        drafter,
        graphs,
        max_running=rng.choice([1, 2, 4, 6]),
        prefill_chunk=32,
        page_size=rng.choice([1, 4, 16]),
        num_pages=700,
    )
    shape = rng.choice(SHAPES)
    handles: dict[int, int] = {}
    paused: set[int] = set()
    cancelled: set[int] = set()
    waiting = list(range(len(prompts)))
    while waiting or paused or harness.engine.has_work():
        if waiting and rng.random() < 0.3:
            index = waiting.pop(0)
            mode = rng.choice(
                [
                    SpeculationMode.ON,
                    SpeculationMode.ON,
                    SpeculationMode.ON,
                    SpeculationMode.AUTO,
                    SpeculationMode.OFF,
                ]
            )
            handles[index] = harness.submit(
                prompts[index],
                lengths[index],
                request_id=str(index),
                sampling=samplings[index],
                mode=mode,
                shape=shape if rng.random() < 0.8 else rng.choice(SHAPES),
                trace=rng.random() < 0.1,
            )
            if index % 6 == 5:
                cancelled.add(index)
        if handles and rng.random() < 0.1:
            index = rng.choice(list(handles))
            if index in paused:
                paused.remove(index)
                harness.engine.resume(handles[index])
            else:
                paused.add(index)
                harness.engine.pause(handles[index])
        if paused and not harness.engine.has_work():
            for index in paused:
                harness.engine.resume(handles[index])
            paused.clear()
        for index in list(cancelled):
            if index in handles and rng.random() < 0.1:
                harness.engine.cancel(handles[index])
        if harness.engine.has_work():
            harness.step()
    harness.check_idle()
    assert not harness.sink.failed
    for index, prompt in enumerate(prompts):
        found = harness.sink.tokens.get(str(index), [])
        finished = harness.sink.finished[str(index)]
        if finished.reason is FinishReason.CANCELLED:
            assert index in cancelled
            assert found == plain[index][: len(found)]
        else:
            assert_same_tokens(decoder, prompt, plain[index], found, samplings[index])
        assert finished.completion_tokens == len(found)
    assert drafter.seats > 0
    assert not drafter.sequences, "every sequence must be closed on the draft"


def test_retraction(decoder: Decoder) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(4)]
    sampling = SamplingParams(temperature=1.0, seed=3)
    plain = [generate_plain(decoder, NoDrafter(), prompt, 60, sampling=sampling) for prompt in prompts]
    drafter = AnswerDrafter(
        [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)], VOCAB, 0.7
    )
    harness = looped(decoder, drafter, num_pages=24, page_size=8)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 60, request_id=str(index), sampling=sampling, shape=(3, 2, 7))
    harness.run()
    assert harness.scheduler.num_retractions > 0, "the pool must be too small for this test"
    assert drafter.seats > 0
    for index, prompt in enumerate(prompts):
        assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)], sampling)


@pytest.mark.parametrize(("shape", "part"), [(None, 0), ((5, 1, 6), 1), ((5, 4, 21), 2)])
def test_stop_tokens_cut_inside_the_accepted_run(
    decoder: Decoder, shape: tuple[int, int, int] | None, part: int
) -> None:
    """Every token of the plain output is the stop token once: every third one with each shape."""
    sampling = SamplingParams(temperature=1.0, seed=21)
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 40, sampling=sampling)
    for stop in list(dict.fromkeys(plain))[part::3]:
        expected = plain[: plain.index(stop) + 1]
        drafter: Drafter = AnswerDrafter([PROMPT + plain], VOCAB, 1.0) if shape else NoDrafter()
        harness = looped(decoder, drafter, eos=[stop])
        harness.submit(PROMPT, 40, request_id="a", sampling=sampling, shape=shape)
        harness.submit(PROMPT, 40, request_id="b", sampling=sampling, shape=shape, ignore_eos=True)
        harness.run()
        finished = harness.sink.finished["a"]
        assert harness.sink.tokens["a"] == expected
        assert (finished.reason, finished.matched_token) == (FinishReason.STOP, stop)
        assert finished.completion_tokens == len(expected)
        assert harness.sink.tokens["b"] == plain


@pytest.mark.parametrize("steps", range(14))
def test_cancel_at_every_step(decoder: Decoder, steps: int) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 40)
    harness = looped(decoder, AnswerDrafter([PROMPT + plain], VOCAB), prefill_chunk=3)
    handle = harness.submit(PROMPT, 40, request_id="a", shape=(3, 2, 7))
    harness.submit(PROMPT, 40, request_id="b", shape=(3, 2, 7))
    for _ in range(steps):
        if harness.engine.has_work():
            harness.step()
    harness.engine.cancel(handle, keep_tokens=2)
    harness.run()
    told = harness.sink.tokens.get("a", [])
    assert told == plain[: len(told)]
    assert harness.sink.finished["a"].completion_tokens == min(len(told), 2 if len(told) < 40 else 40)
    assert harness.sink.tokens["b"] == plain


def test_a_deadline_ends_one_request_only(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60)
    harness = looped(decoder, AnswerDrafter([PROMPT + plain], VOCAB, 0.2))
    deadline = time.monotonic() + 3600
    harness.submit(PROMPT, 60, request_id="late", shape=(3, 2, 7), deadline=deadline)
    harness.submit(PROMPT, 60, request_id="b", shape=(3, 2, 7))
    for _ in range(8):
        harness.step()
    harness.engine._receive(deadline)
    harness.run()
    assert harness.sink.failed["late"].error.code is ErrorCode.DEADLINE_EXCEEDED
    assert len(harness.sink.tokens["late"]) < 60
    assert harness.sink.tokens["b"] == plain


@pytest.mark.parametrize("every", range(1, 8))
@pytest.mark.parametrize("captures", [False, True])
def test_a_row_that_the_drafter_has_no_room_for_verifies_its_root_alone(
    decoder: Decoder, every: int, captures: bool
) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 40)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, 0.5, features_of(decoder) if captures else None)
    drafter.refuse_every = every
    harness = looped(decoder, drafter)
    for name in ("a", "b"):
        harness.submit(PROMPT, 40, request_id=name, shape=(3, 2, 7))
    harness.run()
    for name in ("a", "b"):
        assert harness.sink.tokens[name] == plain
    stats = harness.engine.stats().speculation
    assert set(stats.fallbacks) == {"kv_full"}
    assert stats.rounds - stats.draft_rounds <= stats.fallbacks["kv_full"]
    assert (stats.draft_rounds > 0) == (every > 1)
    assert drafter.catch_ups >= stats.fallbacks["kv_full"], "a refused session must be caught up"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("captures", [False, True])
def test_a_sequence_that_is_not_a_number_fails_alone(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, plan: LoopPlan, captures: bool
) -> None:
    """One sequence fails in a round and one in its prefill, beside a tree, a chain and a plain entry."""
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60)
    victim = [1, 2, 3, 4]
    doomed = generate_plain(decoder, NoDrafter(), victim, 60)
    poison = next(token for token in doomed[10:] if token not in plain and token not in doomed[:10])
    forward = decoder.forward

    def poisoned(tokens: torch.Tensor, *arguments: object) -> object:
        output = forward(tokens, *arguments)  # type: ignore[arg-type]
        output.hidden[tokens == poison] = torch.nan
        return output

    monkeypatch.setattr(decoder, "forward", poisoned)
    spec = features_of(decoder) if captures else None
    drafter = AnswerDrafter([PROMPT + plain, victim + doomed], VOCAB, spec=spec)
    harness = make_harness(decoder, drafter, plan=plan)
    shapes = {"bad": (3, 2, 7), "good": (3, 2, 7), "chain": (5, 1, 6), "plain": None, "worse": (5, 4, 21)}
    prompts = {"bad": victim, "worse": [7, 8, poison]}
    for name, shape in shapes.items():
        harness.submit(
            prompts.get(name, PROMPT),
            60,
            request_id=name,
            shape=shape,
            mode=SpeculationMode.ON if shape else SpeculationMode.OFF,
        )
        harness.step()
    harness.run()
    assert set(harness.sink.failed) == {"bad", "worse"}
    assert {one.error.reason for one in harness.sink.failed.values()} == {"numerical_error"}
    told = harness.sink.tokens["bad"]
    assert told == doomed[: len(told)]
    assert len(told) > 10
    assert "worse" not in harness.sink.tokens
    for name in ("good", "chain", "plain"):
        assert harness.sink.tokens[name] == plain
    assert all(not plane.isnan().any() for plane in harness.runner.pool.planes())
    assert not drafter.sequences


def test_feature_rows_are_those_of_drafts_through_the_host(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 50)
    kept: list[torch.Tensor] = []
    for plan in PLANS:
        drafter = AnswerDrafter([PROMPT + plain], VOCAB, 0.6, features_of(decoder))
        harness = make_harness(decoder, drafter, plan=plan)
        harness.submit(PROMPT, 50, request_id="a", shape=(5, 4, 21))
        rows: list[torch.Tensor] = []
        while harness.engine.has_work():
            harness.step()
            rows = next((list(found) for found in drafter.rows.values()), rows)
        assert harness.sink.tokens["a"] == plain
        kept.append(torch.stack(rows[:40]))
    for rows_of_plan in kept[1:]:
        assert torch.allclose(kept[0], rows_of_plan, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("captures", [False, True])
def test_the_drafter_learns_what_rounds_without_drafts_have_chosen(
    decoder: Decoder, plan: LoopPlan, captures: bool
) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 90)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, 0.9, features_of(decoder) if captures else None)
    harness = make_harness(decoder, drafter, plan=plan)
    harness.submit(PROMPT, 90, request_id="a", mode=SpeculationMode.AUTO, shape=(5, 1, 6))
    harness.run()
    assert harness.sink.tokens["a"] == plain
    report = harness.sink.finished["a"].speculation
    assert report.draft_tokens > 0, "the controller must have tried drafts"
    assert report.accepted_tokens > 0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_traces_explain_every_token(decoder: Decoder, shape: tuple[int, int, int], plan: LoopPlan) -> None:
    prompts = [PROMPT, [1, 2, 3], [60] * 30]
    plain = [generate_plain(decoder, NoDrafter(), prompt, 40) for prompt in prompts]
    answers = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    drafter = AnswerDrafter(answers, VOCAB, 0.7, features_of(decoder))
    harness = make_harness(decoder, drafter, plan=plan)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 40, request_id=str(index), shape=shape, trace=index != 1)
    harness.run()
    for index, prompt in enumerate(prompts):
        assert harness.sink.tokens[str(index)] == plain[index]
        assert harness.sink.finished[str(index)].speculation.accepted_tokens > 0
        if index == 1:
            assert not harness.sink.rounds[str(index)]
        else:
            rounds = harness.sink.rounds[str(index)]
            assert check_traces(rounds, [*prompt, *plain[index]], len(prompt)) == 1
            check_report(harness.sink.finished[str(index)], rounds)
