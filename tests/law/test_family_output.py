"""Greedy output of every target family equals plain decoding and transformers, with and without speculation.

The tests cover batches, and texts longer than the attention window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import (
    FakeDrafter,
    Node,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.models.family_models import CASES, VOCAB, WINDOW, reference, save
from support.outputs.greedy_answer import greedy_answer

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import ProposalRow

torch.set_num_threads(1)
NEW_TOKENS = 30
SHAPES = [(4, 1, 5), (5, 3, 12)]
LENGTHS = (3, WINDOW + 9, 2 * WINDOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def answer(case: str, decoder: Decoder, prompt: list[int]) -> list[int]:
    """Return transformers' greedy answer, computed without a KV cache to rule out cache errors."""

    def next_tokens(tokens: Sequence[int]) -> list[int]:
        with torch.no_grad():
            logits = reference(case)(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.argmax(-1).tolist()

    guess = generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS)
    return greedy_answer(next_tokens, prompt, guess)


def ngram_plan(tokens: list[int], row: ProposalRow) -> list[Node]:
    """Propose as one chain the tokens that followed the last token at its previous occurrence."""
    earlier = [index for index, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    chain = tokens[earlier[-1] + 1 :][: row.shape.max_nodes - 1] if earlier else []
    return [(token, parent) for parent, token in enumerate(chain)]


@pytest.mark.parametrize("case", list(CASES))
def test_greedy_output_is_that_of_transformers_with_and_without_speculation(case: str, folder: Path) -> None:
    decoder = load_toy(save(case, folder))
    expected = [answer(case, decoder, prompt) for prompt in prompts()]
    truth = [prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]
    plans = {"oracle": oracle_plan(truth, VOCAB, 0.7), "garbage": random_plan(VOCAB), "ngram": ngram_plan}
    accepted = {}
    for name, plan in plans.items():
        harness = make_harness(decoder, FakeDrafter(plan), num_pages=96, page_size=4, prefill_chunk=32)
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, NEW_TOKENS, request_id=f"off {index}", mode=SpeculationMode.OFF)
            for shape in SHAPES:
                harness.submit(prompt, NEW_TOKENS, request_id=f"{shape} {index}", shape=shape)
        harness.run()
        for index, prompt in enumerate(prompts()):
            for kind in ("off", *SHAPES):
                assert_same_tokens(decoder, prompt, expected[index], harness.sink.tokens[f"{kind} {index}"])
        accepted[name] = [
            harness.sink.finished[f"{SHAPES[-1]} {index}"].speculation.accepted_tokens
            for index in range(len(LENGTHS))
        ]
    print(f"{case}: accepted draft tokens per request {accepted}")
    assert min(accepted["oracle"]) > NEW_TOKENS // 3
