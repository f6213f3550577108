"""Greedy output of families that run through transformers equals transformers, also with speculation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.target_harness import (
    FakeDrafter,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.models.generic_models import CASES, VOCAB, WINDOW, reference_logits, save
from support.outputs.greedy_answer import greedy_answer

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
NEW_TOKENS = 20
SHAPES = [(4, 1, 5), (4, 3, 10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generic")


def answer(case: str, decoder: Decoder, prompt: list[int]) -> list[int]:
    """Return transformers' greedy answer, computed without a KV cache to rule out cache errors."""
    guess = generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS)
    return greedy_answer(lambda tokens: reference_logits(case, tokens).argmax(-1).tolist(), prompt, guess)


@pytest.mark.parametrize("case", list(CASES))
def test_greedy_output_is_that_of_transformers_with_and_without_speculation(case: str, folder: Path) -> None:
    decoder = load_toy(save(case, folder))
    prompts = [
        torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in (3, WINDOW + 9)
    ]
    expected = [answer(case, decoder, prompt) for prompt in prompts]
    truth = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    for name, plan in {"oracle": oracle_plan(truth, VOCAB, 0.7), "garbage": random_plan(VOCAB)}.items():
        harness = make_harness(decoder, FakeDrafter(plan), num_pages=96, page_size=4, prefill_chunk=32)
        for index, prompt in enumerate(prompts):
            harness.submit(prompt, NEW_TOKENS, request_id=f"off {index}", mode=SpeculationMode.OFF)
            for shape in SHAPES:
                harness.submit(prompt, NEW_TOKENS, request_id=f"{shape} {index}", shape=shape)
        harness.run()
        for index, prompt in enumerate(prompts):
            for kind in ("off", *SHAPES):
                assert_same_tokens(decoder, prompt, expected[index], harness.sink.tokens[f"{kind} {index}"])
        accepted = [
            harness.sink.finished[f"{SHAPES[-1]} {index}"].speculation.accepted_tokens
            for index in range(len(prompts))
        ]
        assert name != "oracle" or min(accepted) > NEW_TOKENS // 4
