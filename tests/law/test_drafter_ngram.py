"""N-gram drafting in the real engine: output equals plain decoding; repetitive text needs fewer rounds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_target, successor

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16)]


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("random"), vocab_size=VOCAB, seed=3, num_layers=3)
    )


@pytest.fixture(scope="module")
def repetitive_target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model that nearly always continues token v with `successor`(v).

    `successor` is a permutation, so the text runs in a cycle.
    """
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("planted"), vocab_size=VOCAB, planted=6.0, num_layers=4)
    )


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
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=11)]
)
def test_output_is_that_of_plain_decoding(
    random_target: Decoder, shape: tuple[int, int, int], sampling: SamplingParams
) -> None:
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
def test_text_that_repeats_itself_takes_less_than_half_the_rounds(
    repetitive_target: Decoder, shape: tuple[int, int, int]
) -> None:
    prompt = circle(3, 70)  # the cycle's length is 64 or a divisor of 64
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
        lengths[name] = (
            accept_length(harness, "a") if harness.sink.finished["a"].speculation.draft_tokens else 1.0
        )
        assert harness.sink.tokens["a"] == generate_plain(repetitive_target, NoDrafter(), prompt, 24)
    assert lengths["corpus"] >= 2.0 > lengths["alone"]


def test_retracted_and_reopened_sequences_forget_nothing(repetitive_target: Decoder) -> None:
    prompts = [circle(start, 30) for start in (1, 2, 3, 4)]
    harness = make_harness(repetitive_target, drafter_for(repetitive_target), num_pages=24, page_size=8)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 60, request_id=str(index), shape=(3, 2, 8))
    harness.run()
    assert harness.scheduler.num_retractions > 0, "the pool must be too small for this test"
    for index, prompt in enumerate(prompts):
        plain = generate_plain(repetitive_target, NoDrafter(), prompt, 60)
        assert_same_tokens(repetitive_target, prompt, plain, harness.sink.tokens[str(index)])


def reference_chain(text: list[int], depth: int) -> list[int]:
    """Return the chain that n-grams predict after `text`, by a search of all earlier positions.

    Each step takes the continuation with the largest weight. A position's weight doubles for each token of
    shared context (12 at most), and grows up to twofold with its index.
    """
    last = len(text) - 1
    weighed = []
    for end in range(last):
        shared = 0
        while shared < min(12, end + 1) and text[end - shared] == text[last - shared]:
            shared += 1
        if shared:
            copied = text[end + 1 :]
            while len(copied) < depth:
                copied = copied + copied[: depth - len(copied)]
            weighed.append((shared, end, 2.0**shared * (1 + end / last), copied[:depth]))
    weighed = sorted(weighed, key=lambda one: (one[0], one[1]), reverse=True)[:48]
    chain: list[int] = []
    while weighed and len(chain) < depth:
        totals: dict[int, float] = {}
        for _, _, weight, copied in weighed:
            totals[copied[len(chain)]] = totals.get(copied[len(chain)], 0.0) + weight
        chain.append(max(totals, key=lambda token: totals[token]))
        weighed = [one for one in weighed if one[3][: len(chain)] == chain]
    return chain


@pytest.mark.parametrize("depth", [2, 5])
def test_chains_are_accepted_as_those_of_a_plain_reference(repetitive_target: Decoder, depth: int) -> None:
    """For repetitive texts with errors, the accept length equals the reference's."""
    rng = random.Random(depth)
    prompts = [
        [token if rng.random() < 0.9 else rng.randrange(VOCAB) for token in circle(start, 90)]
        for start in (3, 5, 8)
    ]
    harness = make_harness(repetitive_target, drafter_for(repetitive_target))
    expected_rounds = 0
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 40, request_id=str(index), shape=(depth, 1, depth + 1))
        truth = prompt + generate_plain(repetitive_target, NoDrafter(), prompt, 40 + depth)
        length = len(prompt) + 1
        while length < len(prompt) + 40:
            chain = reference_chain(truth[:length], depth)
            length += 1 + next((i for i, token in enumerate(chain) if token != truth[length + i]), len(chain))
            expected_rounds += 1
    harness.run()
    rounds = sum(finished.speculation.rounds for finished in harness.sink.finished.values())
    assert abs(rounds - expected_rounds) <= 0.02 * expected_rounds
    assert 3 * 39 / rounds >= 2.0
