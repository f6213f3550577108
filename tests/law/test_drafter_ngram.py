"""N-gram drafting through the real engine: the output of plain decoding, in fewer rounds where the text repeats itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from toys import make_toy_target, successor

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafter import NoDrafter
from outrider.services.target.request import SamplingParams
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16)]


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("random"), vocab_size=VOCAB, seed=3))


@pytest.fixture(scope="module")
def repetitive_target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Continues token v with `successor`(v) nearly always: a permutation, so that its text runs in a circle."""
    return load_toy(make_toy_target(tmp_path_factory.mktemp("planted"), vocab_size=VOCAB, planted=6.0, num_layers=4))


def drafter_for(decoder: Decoder, **settings: object) -> InprocDrafter:
    return drafter_beside(decoder, DraftSettings.load({"speculative_algorithm": "NGRAM", **settings}))


def circle(start: int, length: int) -> list[int]:
    tokens = [start]
    rule = successor(VOCAB).tolist()
    while len(tokens) < length:
        tokens.append(rule[tokens[-1]])
    return tokens


def accept_length(harness: Harness, request_id: str) -> float:
    return harness.sink.finished[request_id].speculation.accept_length


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=11)])
def test_output_is_that_of_plain_decoding(random_target: Decoder, shape: tuple[int, int, int], sampling: SamplingParams) -> None:
    rng = random.Random(shape[2])
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 30)]
    harness = make_harness(random_target, drafter_for(random_target))
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 40, request_id=str(index), sampling=sampling, shape=shape)
    harness.run()
    for index, prompt in enumerate(prompts):
        plain = generate_plain(random_target, NoDrafter(), prompt, 40, sampling=sampling)
        assert_same_tokens(random_target, prompt, plain, harness.sink.tokens[str(index)], sampling)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_text_that_repeats_itself_takes_less_than_half_the_rounds(repetitive_target: Decoder, shape: tuple[int, int, int]) -> None:
    prompt = circle(3, 70)  # the circle has 64 tokens or a divisor of them
    plain = generate_plain(repetitive_target, NoDrafter(), prompt, 60)
    harness = make_harness(repetitive_target, drafter_for(repetitive_target))
    harness.submit(prompt, 60, request_id="a", shape=shape)
    harness.run()
    assert_same_tokens(repetitive_target, prompt, plain, harness.sink.tokens["a"])
    assert accept_length(harness, "a") >= 2.0


def test_a_corpus_helps_from_the_first_token_on(repetitive_target: Decoder, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f"{circle(0, 130)}\n")
    prompt = circle(5, 4)
    lengths = {}
    for name, settings in {"alone": {}, "corpus": {"ngram_corpus": corpus}}.items():
        harness = make_harness(repetitive_target, drafter_for(repetitive_target, **settings))
        harness.submit(prompt, 24, request_id="a", shape=(5, 4, 16))
        harness.run()
        lengths[name] = accept_length(harness, "a") if harness.sink.finished["a"].speculation.draft_tokens else 1.0
        assert harness.sink.tokens["a"] == generate_plain(repetitive_target, NoDrafter(), prompt, 24)
    assert lengths["corpus"] >= 2.0 > lengths["alone"]


def test_retracted_and_reopened_sequences_forget_nothing(repetitive_target: Decoder) -> None:
    prompts = [circle(start, 30) for start in (1, 2, 3, 4)]
    harness = make_harness(repetitive_target, drafter_for(repetitive_target), num_pages=24, page_size=8)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 60, request_id=str(index), shape=(3, 2, 8))
    harness.run()
    assert harness.scheduler.num_retractions > 0, "the pool was meant to be too small"
    for index, prompt in enumerate(prompts):
        plain = generate_plain(repetitive_target, NoDrafter(), prompt, 60)
        assert_same_tokens(repetitive_target, prompt, plain, harness.sink.tokens[str(index)])
