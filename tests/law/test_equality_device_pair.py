"""Real drafts of every kind in the target's process, with device-resident rounds and changing batches.

The tests check that the output equals plain decoding, and that drafts stay equally good when a batch
shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from support.drafts.draft_pairs import KINDS, Pair, make_pair
from support.engine.target_harness import assert_same_tokens, generate_plain, make_harness
from support.suite.compute_device import DEVICE, GRAPHS

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.model_runner import ChosenTokens
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True)
PLANS = [None, LoopPlan(lookahead=0, drafts_on_device=True), AHEAD]
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16)]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def decoder(pair: Pair) -> Decoder:
    return pair.decoder


@pytest.fixture
def drafter(pair: Pair) -> Iterator[InprocDrafter]:
    made = drafter_beside(pair.decoder, pair.settings)
    assert made.on_device is made
    yield made
    made.shutdown()


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_rounds_on_the_device_are_those_of_drafts_through_the_host(
    pair: Pair,
    decoder: Decoder,
    drafter: InprocDrafter,
    number: int,
    graphs: bool,
) -> None:
    """The temperature is 0 and 1 by turns over the shapes, so every drafter has two shapes with each.

    The turns begin with the other temperature for every second drafter, so every shape has both.
    """
    shape = SHAPES[number]
    sampling = SamplingParams(temperature=float((list(KINDS).index(pair.kind) + number) % 2), seed=9)
    prompt = [1, 2, 3, 4]
    plain = generate_plain(decoder, NoDrafter(), prompt, 40, sampling=sampling)
    rounds = []
    for plan in PLANS:
        harness = make_harness(decoder, drafter, plan=plan, graphs=GraphCache(DEVICE, graphs))
        harness.submit(prompt, 40, request_id="a", sampling=sampling, shape=shape)
        harness.run()
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens["a"], sampling)
        report = harness.sink.finished["a"].speculation
        assert report.fallback_reason == ""
        rounds.append((report.rounds, report.accepted_tokens))
    assert rounds[0] == rounds[1] == rounds[2]
    assert rounds[0][1] > 0 or not pair.often


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("shape", [(5, 1, 6), (5, 4, 16)])
def test_drafts_are_as_good_in_a_batch_that_shrinks(
    pair: Pair, decoder: Decoder, drafter: InprocDrafter, shape: tuple[int, int, int], graphs: bool
) -> None:
    prompts, lengths = [[1, 2, 3, 4], [9, 8, 7], [5, 5], [6, 1, 6, 1, 6]], [40, 8, 17, 29]
    plain = [
        generate_plain(decoder, NoDrafter(), prompt, length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    reports = []
    for plan in PLANS:
        harness = make_harness(decoder, drafter, plan=plan, graphs=GraphCache(DEVICE, graphs))
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            harness.submit(prompt, length, request_id=str(index), shape=shape)
        with mock.patch.object(drafter, "propose", wraps=drafter.propose) as proposed:
            harness.run()
        assert bool(proposed.call_count) == (plan is None), (
            "rounds on the device need no proposal of the host"
        )
        for index, prompt in enumerate(prompts):
            assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)])
        found = [harness.sink.finished[str(index)].speculation for index in range(len(prompts))]
        reports.append([(report.rounds, report.accepted_tokens) for report in found])
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("plan", PLANS)
def test_a_prompt_is_in_the_drafts_cache_before_its_token_is_waited_for(
    decoder: Decoder, drafter: InprocDrafter, chunk: int, plan: LoopPlan | None
) -> None:
    prompts = [[7, 3, 5, 1] * 5, [2, 4] * 9]
    plain = [generate_plain(decoder, NoDrafter(), prompt, 20) for prompt in prompts]
    sessions, behind = drafter._engine.sessions, dict[int, int]()
    wait = ChosenTokens.wait

    def noted(chosen: ChosenTokens) -> list[int]:
        behind.update(
            {session.session_id: session.extendable_rows for session in sessions if session.tokens in prompts}
        )
        return wait(chosen)

    harness = make_harness(decoder, drafter, plan=plan, prefill_chunk=chunk)
    with mock.patch.object(ChosenTokens, "wait", noted):
        for index, prompt in enumerate(prompts):
            harness.submit(prompt, 20, request_id=str(index), shape=(5, 4, 16))
        harness.run()
    left = 1 if plan is None else 0
    assert list(behind.values()) == [left, left], "at most the entry that needs the token waits for it"
    for index, prompt in enumerate(prompts):
        assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)])
        assert harness.sink.finished[str(index)].speculation.fallback_reason == ""


def test_who_gets_one_token_is_not_drafted_for(decoder: Decoder, drafter: InprocDrafter) -> None:
    harness = make_harness(decoder, drafter, plan=AHEAD)
    with mock.patch.object(drafter._engine.strategy, "extend", side_effect=AssertionError("needless work")):
        harness.submit([7, 3, 5, 1] * 5, 1, request_id="a")
        harness.run()
    assert len(harness.sink.tokens["a"]) == 1


def test_a_draft_that_fails_on_a_prompt_costs_only_drafts(decoder: Decoder, drafter: InprocDrafter) -> None:
    prompt = [7, 3, 5, 1] * 5
    plain = generate_plain(decoder, NoDrafter(), prompt, 30)
    harness = make_harness(decoder, drafter, plan=AHEAD)
    strategy, calls = drafter._engine.strategy, []
    extend = strategy.extend

    def broken(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        extend(*arguments, **options)  # type: ignore[arg-type]

    with mock.patch.object(strategy, "extend", side_effect=broken):
        harness.submit(prompt, 30, request_id="a", shape=(5, 4, 16))
        harness.run()
    assert_same_tokens(decoder, prompt, plain, harness.sink.tokens["a"])
    assert len(calls) > 1, "the sequence must be opened again"


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("seed", range(2))
def test_batches_that_change(decoder: Decoder, drafter: InprocDrafter, seed: int, graphs: bool) -> None:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(decoder.config.vocab_size) for _ in range(rng.choice([1, 3, 17, 60]))]
        for _ in range(10)
    ]
    samplings = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1 << 64)
        )
        for _ in prompts
    ]
    lengths = [rng.randrange(1, 50) for _ in prompts]
    harness = make_harness(
        decoder,
        drafter,
        plan=AHEAD,
        graphs=GraphCache(DEVICE, graphs),
        max_running=rng.choice([2, 4]),
        prefill_chunk=64,
        num_pages=rng.choice([30, 60]),
    )
    waiting, handles = list(range(len(prompts))), []
    while waiting or harness.engine.num_live:
        if waiting and rng.random() < 0.2:
            index = waiting.pop(0)
            mode = rng.choice(
                [SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF]
            )
            shape = (5, 4, 16) if rng.random() < 0.7 else (3, 1, 4)
            handles.append(
                harness.submit(
                    prompts[index],
                    lengths[index],
                    request_id=str(index),
                    sampling=samplings[index],
                    mode=mode,
                    shape=shape,
                )
            )
        if handles and rng.random() < 0.05:
            harness.engine.pause(handles[-1])
        if handles and rng.random() < 0.2:
            harness.engine.resume(handles[-1])
        if harness.engine.has_work():
            harness.step()
        else:
            for handle in handles:
                harness.engine.resume(handle)
    harness.check_idle()
    assert not harness.sink.failed
    for index, prompt in enumerate(prompts):
        plain = generate_plain(decoder, NoDrafter(), prompt, lengths[index], sampling=samplings[index])
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], samplings[index])
