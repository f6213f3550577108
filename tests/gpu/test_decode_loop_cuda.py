"""Tests of rounds in CUDA graphs: the same tokens as in eager rounds and as alone, and no leaks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from support.drafts.gpu_pair import HEAD, TARGET, make_pair_drafter
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, make_harness

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.graph_key import GraphKey
from outrider.shared.base.generation import FinishReason, SamplingParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Drafter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=(1 << 64) - 3),
]
SHAPES = [(5, 1, 6), (3, 2, 7), (5, 8, 33)]
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    assert HEAD.is_dir()
    return load_decoder(TARGET, "cuda", torch.float32)


@pytest.fixture(scope="module")
def prompts(decoder: Decoder) -> list[list[int]]:
    rng = random.Random(5)
    return [
        [rng.randrange(decoder.config.vocab_size) for _ in range(rng.choice([1, 5, 20, 70]))]
        for _ in range(32)
    ]


def looped(decoder: Decoder, drafter: Drafter, *, graphs: bool = True, **options: object) -> Harness:
    cache = GraphCache(decoder.device, graphs)
    return make_harness(decoder, drafter, plan=AHEAD, graphs=cache, max_running=32, **options)  # type: ignore[arg-type]


def recorded_rows(harness: Harness, kind: str) -> set[int]:
    """Return the numbers of rows of all graphs of one kind."""
    keys = harness.runner.graphs.keys
    return {key.rows for key in keys if isinstance(key, GraphKey) and key.kind == kind}


def vocab_of(decoder: Decoder) -> int:
    return decoder.config.vocab_size


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_rounds_emit_what_each_request_emits_alone(
    decoder: Decoder, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    for graphs in (False, True):
        harness = looped(decoder, NoDrafter(decoder.device), graphs=graphs)
        for index in range(3):
            harness.submit(prompts[index], 60, request_id=str(index), sampling=sampling)
        harness.run()
        for index in range(3):
            plain = generate_plain(decoder, NoDrafter(decoder.device), prompts[index], 60, sampling=sampling)
            assert_same_tokens(decoder, prompts[index], plain, harness.sink.tokens[str(index)], sampling)
        assert bool(recorded_rows(harness, "verify")) == graphs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_graphs_emit_what_eager_rounds_emit(
    decoder: Decoder, prompts: list[list[int]], shape: tuple[int, int, int], sampling: SamplingParams
) -> None:
    count = 3
    plain = [
        generate_plain(decoder, NoDrafter(decoder.device), prompt, 60, sampling=sampling)
        for prompt in prompts[:count]
    ]
    answers = [prompt + answer for prompt, answer in zip(prompts, plain, strict=False)]
    emitted = []
    for graphs in (False, True):
        drafter = AnswerDrafter(answers, vocab_of(decoder), device=decoder.device, checked=False)
        harness = looped(decoder, drafter, graphs=graphs)
        for index in range(count):
            harness.submit(prompts[index], 60, request_id=str(index), sampling=sampling, shape=shape)
        harness.run()
        assert drafter.seats > 0
        assert bool(recorded_rows(harness, "draft")) == graphs
        stats = harness.engine.stats().speculation
        assert stats.accept_length > 1.5
        emitted.append((dict(harness.sink.tokens), stats.rounds, stats.accepted_tokens))
        for index in range(count):
            assert_same_tokens(
                decoder, prompts[index], plain[index], harness.sink.tokens[str(index)], sampling
            )
    assert emitted[0] == emitted[1], "the same kernels on the same inputs must emit the same tokens"


@pytest.mark.parametrize("plan", [AHEAD, LoopPlan(drafts_on_device=True), LoopPlan()], ids=str)
def test_the_demo_pair_drafts_on_the_device_and_through_the_host(
    decoder: Decoder, prompts: list[list[int]], plan: LoopPlan
) -> None:
    drafter = make_pair_drafter(decoder)
    harness = make_harness(decoder, drafter, plan=plan, graphs=GraphCache(decoder.device))
    expected = {}
    for index, sampling in enumerate(SAMPLINGS):
        for shape in ((5, 1, 6), (5, 4, 16)):
            name = f"{index}-{shape[1]}"
            harness.submit(prompts[index], 80, request_id=name, sampling=sampling, shape=shape)
            harness.run()
            expected[name] = (prompts[index], sampling)
            print(name, "accept length", harness.sink.finished[name].speculation.accept_length)
            assert harness.sink.finished[name].speculation.fallback_reason == ""
    for name, (prompt, sampling) in expected.items():
        plain = generate_plain(decoder, NoDrafter(decoder.device), prompt, 80, sampling=sampling)
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[name], sampling)
    assert bool(recorded_rows(harness, "draft")) == plan.drafts_on_device
    assert recorded_rows(harness, "verify")
    drafter.shutdown()


@pytest.mark.parametrize("shape", [None, (3, 2, 7)])
def test_a_batch_that_shrinks_from_32_to_1(
    decoder: Decoder, prompts: list[list[int]], shape: tuple[int, int, int] | None
) -> None:
    lengths = [4 + 3 * index for index in range(32)]
    plain = [
        generate_plain(decoder, NoDrafter(decoder.device), prompt, length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    answers = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    drafter: Drafter = NoDrafter(decoder.device)
    if shape is not None:
        drafter = AnswerDrafter(answers, vocab_of(decoder), 0.6, device=decoder.device, checked=False)
    harness = looped(decoder, drafter)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, lengths[index], request_id=str(index), shape=shape)
    harness.run()
    for index, prompt in enumerate(prompts):
        assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)])
    if shape is None:
        assert recorded_rows(harness, "verify") >= {1, 2, 4, 8, 16, 32}
    else:
        assert recorded_rows(harness, "draft") >= {1, 2, 4, 8, 16, 32}
        assert min(recorded_rows(harness, "verify")) < 16
        assert max(recorded_rows(harness, "verify")) > 16 * shape[2]


def test_aborts_at_every_step(decoder: Decoder, prompts: list[list[int]]) -> None:
    plain = [generate_plain(decoder, NoDrafter(decoder.device), prompt, 40) for prompt in prompts[:2]]
    answers = [prompt + answer for prompt, answer in zip(prompts, plain, strict=False)]
    drafter = AnswerDrafter(answers, vocab_of(decoder), device=decoder.device, checked=False)
    harness = looped(decoder, drafter)
    for steps in range(20):
        names = f"a{steps}", f"b{steps}"
        handle = harness.submit(prompts[0], 40, request_id=names[0], shape=(3, 2, 7))
        harness.submit(prompts[1], 40, request_id=names[1], shape=(3, 2, 7))
        for _ in range(steps):
            if harness.engine.has_work():
                harness.step()
        harness.engine.cancel(handle)
        harness.run()
        finished = harness.sink.finished[names[0]]
        told = harness.sink.tokens.get(names[0], [])
        assert finished.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        assert_same_tokens(decoder, prompts[0], plain[0][: len(told)], told)
        assert_same_tokens(decoder, prompts[1], plain[1], harness.sink.tokens[names[1]])
        assert harness.scheduler.allocator.held_pages == 0
    assert not drafter.sequences


def steady(decoder: Decoder, prompts: list[list[int]]) -> tuple[Harness, Callable[[], None]]:
    answers = [
        prompt + generate_plain(decoder, NoDrafter(decoder.device), prompt, 200) for prompt in prompts[:4]
    ]
    harness = looped(decoder, AnswerDrafter(answers, vocab_of(decoder), device=decoder.device, checked=False))

    def rounds() -> None:
        for index in range(4):
            harness.submit(prompts[index], 200, shape=(5, 8, 33))
        harness.run()

    return harness, rounds


def test_memory_is_flat_over_rounds(decoder: Decoder, prompts: list[list[int]]) -> None:
    harness, rounds = steady(decoder, prompts)
    rounds()
    rounds()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()  # Earlier tests in this process may have had higher peaks.
    allocated, graphs = torch.cuda.memory_allocated(), harness.runner.graphs.keys
    before = harness.engine.stats().rounds
    for _ in range(5):
        rounds()
    torch.cuda.synchronize()
    assert harness.engine.stats().rounds - before > 200
    assert set(harness.runner.graphs.keys) == set(graphs), "no new graph may be captured"
    assert torch.cuda.memory_allocated() <= allocated + 4096
    assert torch.cuda.max_memory_allocated() < 2 * allocated + (1 << 30)


def test_what_cannot_be_captured_runs_eagerly() -> None:
    cache = GraphCache("cuda")
    numbers = torch.arange(4, device="cuda")
    assert cache.run("asks", lambda: int(numbers.sum().item())) == 6
    assert cache.run("asks", lambda: int(numbers.sum().item())) == 6
    assert cache.keys == ()
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), (
        "later work must not run on the stream of the broken capture"
    )
    assert torch.rand(4, device="cuda").shape == (4,), "the generator must not wait for a capture"
    numbers += 1
    doubled = cache.run("doubles", lambda: numbers * 2)
    assert doubled.tolist() == [2, 4, 6, 8]
    numbers += 1
    assert cache.run("doubles", lambda: numbers * 2).tolist() == [4, 6, 8, 10]
    assert cache.keys == ("doubles",)
    cache.clear()
    assert cache.keys == ()
