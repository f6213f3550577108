"""Output with speculation equals plain decoding, token for token, for every drafter and tree shape.

The batches change during the runs. Greedy output is also compared with transformers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    Node,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.models.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec, ProposalRow

torch.set_num_threads(1)
VOCAB = 64
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16), (8, 3, 40)]
SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_k=5, seed=(1 << 64) - 3),
    SamplingParams(temperature=1.3, top_p=0.8, seed=5, choice_index=2),
    SamplingParams(temperature=1.0, min_p=0.1, seed=6),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=7),
]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)


@pytest.fixture(scope="module")
def decoder(target_dir: Path) -> Decoder:
    return load_toy(target_dir)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_greedy_output_is_that_of_plain_decoding(
    decoder: Decoder, shape: tuple[int, int, int], accuracy: float
) -> None:
    prompt = [5, 9, 2, 33, 7]
    plain = generate_plain(decoder, NoDrafter(), prompt, 40)
    harness = make_harness(decoder, FakeDrafter(oracle_plan([prompt + plain], VOCAB, accuracy)))
    harness.submit(prompt, 40, request_id="a", shape=shape)
    harness.run()
    assert_same_tokens(decoder, prompt, plain, harness.sink.tokens["a"])
    if accuracy == 1.0:
        assert harness.sink.finished["a"].speculation.accept_length > 0.9 * min(shape[0] + 1, 5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_seeded_output_is_that_of_plain_decoding(decoder: Decoder, sampling: SamplingParams) -> None:
    prompt = [1, 2, 3]
    plain = generate_plain(decoder, NoDrafter(), prompt, 60, sampling=sampling)
    drafter = FakeDrafter(oracle_plan([prompt + plain], VOCAB, 0.8))
    harness = make_harness(decoder, drafter)
    for index, shape in enumerate(SHAPES):
        harness.submit(prompt, 60, request_id=str(index), shape=shape, sampling=sampling)
    harness.run()
    for index in range(len(SHAPES)):
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
        assert harness.sink.finished[str(index)].speculation.accepted_tokens > 0


def test_different_seeds_give_different_output(decoder: Decoder) -> None:
    outputs = {
        tuple(
            generate_plain(
                decoder, NoDrafter(), [1, 2, 3], 20, sampling=SamplingParams(temperature=1.0, seed=seed)
            )
        )
        for seed in range(8)
    }
    assert len(outputs) == 8


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100, 500])
def test_greedy_output_is_that_of_transformers(target_dir: Path, decoder: Decoder, length: int) -> None:
    from transformers import LlamaForCausalLM

    prompt = random_prompt(random.Random(length), length)
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    expected = output[0, length:].tolist()
    drafter = FakeDrafter(oracle_plan([prompt + expected], VOCAB, 0.8))
    harness = make_harness(decoder, drafter, prefill_chunk=64)
    harness.submit(prompt, 24, request_id="spec", shape=(5, 4, 16))
    harness.submit(prompt, 24, request_id="plain", mode=SpeculationMode.OFF)
    harness.run()
    assert_same_tokens(decoder, prompt, expected, harness.sink.tokens["plain"])
    assert_same_tokens(decoder, prompt, expected, harness.sink.tokens["spec"])


def hostile_plan(seed: int) -> Callable[[list[int], ProposalRow], list[Node]]:
    """Propose trees as useless as the protocol allows.

    They are empty, have equal siblings, are one long chain of the root's token, or are random.
    """
    rng = random.Random(seed)
    noise = random_plan(VOCAB, seed)

    def plan(tokens: list[int], row: ProposalRow) -> list[Node]:
        kind = rng.randrange(4)
        count = row.shape.max_nodes - 1
        if kind == 0:
            return []
        if kind == 1:
            return [(tokens[-1], 0)] * count
        if kind == 2:
            return [(tokens[-1], index) for index in range(count)]
        return noise(tokens, row)

    return plan


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_batches_that_change_do_not_change_anybodys_output(
    decoder: Decoder, seed: int, max_running: int
) -> None:
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.choice([1, 3, 17, 60, 150])) for _ in range(10)]
    samplings = [
        SamplingParams(temperature=0.0) if rng.random() < 0.5 else rng.choice(SAMPLINGS) for _ in prompts
    ]
    lengths = [rng.randrange(1, 40) for _ in prompts]
    plain = [
        generate_plain(decoder, NoDrafter(), prompt, length, sampling=sampling)
        for prompt, length, sampling in zip(prompts, lengths, samplings, strict=True)
    ]
    oracle = oracle_plan(
        [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)], VOCAB, 0.7, seed
    )
    hostile = hostile_plan(seed)
    drafter = FakeDrafter(lambda tokens, row: (oracle if rng.random() < 0.8 else hostile)(tokens, row))
    harness = make_harness(
        decoder,
        drafter,
        max_running=max_running,
        prefill_chunk=32,
        page_size=rng.choice([1, 4, 16]),
        num_pages=2048,
    )
    waiting = list(range(len(prompts)))
    while waiting or harness.engine.has_work():
        if waiting and rng.random() < 0.5:
            index = waiting.pop(0)
            mode = rng.choice(
                [SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF]
            )
            harness.submit(
                prompts[index],
                lengths[index],
                request_id=str(index),
                sampling=samplings[index],
                mode=mode,
                shape=rng.choice(SHAPES),
            )
        if harness.engine.has_work():
            harness.step()
    harness.check_idle()
    assert not harness.sink.failed
    for index, prompt in enumerate(prompts):
        assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)], samplings[index])
    assert drafter.nodes_proposed > 0
    assert not drafter.sequences, "every sequence must be closed on the draft"


def test_retraction_changes_nothing(decoder: Decoder) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, 20) for _ in range(6)]
    sampling = SamplingParams(temperature=1.0, seed=3)
    plain = [generate_plain(decoder, NoDrafter(), prompt, 60, sampling=sampling) for prompt in prompts]
    drafter = FakeDrafter(
        oracle_plan([prompt + answer for prompt, answer in zip(prompts, plain, strict=True)], VOCAB, 0.7)
    )
    harness = make_harness(decoder, drafter, num_pages=24, page_size=8)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 60, request_id=str(index), sampling=sampling, shape=(3, 2, 8))
    harness.run()
    assert harness.scheduler.num_retractions > 0, "the pool must be too small for this test"
    for index, prompt in enumerate(prompts):
        assert_same_tokens(decoder, prompt, plain[index], harness.sink.tokens[str(index)], sampling)
        finished = harness.sink.finished[str(index)]
        assert finished.completion_tokens == 60


def test_stop_tokens_cut_inside_the_accepted_run(decoder: Decoder) -> None:
    prompt = [5, 9, 2, 33, 7]
    sampling = SamplingParams(temperature=1.0, seed=21)
    plain = generate_plain(decoder, NoDrafter(), prompt, 40, sampling=sampling)
    expected = {stop: plain[: plain.index(stop) + 1] for stop in sorted(set(plain))}

    def harness_of(eos: list[int]) -> Harness:
        return make_harness(decoder, FakeDrafter(oracle_plan([prompt + plain], VOCAB)), eos=eos)

    def submit(harness: Harness, name: str, length: int = 40, **options: Any) -> None:
        options = {"sampling": sampling, "shape": (5, 4, 16), **options}
        harness.submit(prompt, length, request_id=name, **options)

    def check(harness: Harness, name: str, stop: int) -> None:
        finished = harness.sink.finished[name]
        assert harness.sink.tokens[name] == expected[stop]
        assert (finished.reason, finished.matched_token) == (FinishReason.STOP, stop)
        assert finished.completion_tokens == len(expected[stop])

    # Stop tokens of the requests.
    harness = harness_of([])
    for stop in expected:
        submit(harness, f"stops at {stop}", stop=[stop])
    harness.run()
    for stop in expected:
        check(harness, f"stops at {stop}", stop)
    # The stop token of the model. A request that ignores it goes on behind it.
    for index, (stop, text) in enumerate(expected.items()):
        harness = harness_of([stop])
        submit(harness, "stops")
        mode = SpeculationMode.OFF if index % 2 else SpeculationMode.ON
        longer = min(len(text) + 2, 40)
        submit(
            harness, "goes on", longer, mode=mode, shape=None if index % 2 else (5, 4, 16), ignore_eos=True
        )
        harness.run()
        check(harness, "stops", stop)
        assert harness.sink.tokens["goes on"] == plain[:longer], "ignore_eos must ignore the stop token"


def test_captured_features_do_not_depend_on_how_tokens_were_found(decoder: Decoder) -> None:
    spec = FeatureSpec(
        aux_layer_ids=(0, 1, 2), feature_size=3 * decoder.config.hidden_size, fingerprint="raw"
    )
    prompt = random_prompt(random.Random(2), 70)
    plain = generate_plain(decoder, NoDrafter(), prompt, 30)
    rows: dict[float, torch.Tensor] = {}
    for accuracy in (1.0, 0.5, 0.0):
        drafter = FakeDrafter(oracle_plan([prompt + plain], VOCAB, accuracy), spec)
        harness = make_harness(decoder, drafter, prefill_chunk=32)
        harness.submit(prompt, 30, request_id="a", shape=(5, 4, 16))
        kept = _rows_before_the_end(harness, drafter)
        assert harness.sink.tokens["a"] == plain
        rows[accuracy] = kept[:90]
    assert torch.allclose(rows[1.0], rows[0.0], rtol=1e-3, atol=1e-4)
    assert torch.allclose(rows[0.5], rows[0.0], rtol=1e-3, atol=1e-4)


def _rows_before_the_end(harness: Harness, drafter: FakeDrafter) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    while harness.engine.has_work():
        harness.step()
        for rows in drafter.rows.values():
            kept = list(rows)
    return torch.stack(kept)
