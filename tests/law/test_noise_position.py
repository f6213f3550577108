"""Positions of the sampling noise: sampled output equals the specified formula on `transformers` logits.

Token p of a sequence (counted from 0, including the prompt) is the argmax of the processed logits over T plus
Gumbel(seed, p, choice, token). `support.outputs.plain_noise` computes the noise without any kernel. The tests
therefore also notice a shift of all positions, which would be the same in speculation and in plain decoding.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import FakeDrafter, load_toy, make_harness, oracle_plan
from support.models.toys import make_toy_target
from support.outputs.plain_noise import gumbel
from transformers import LlamaForCausalLM

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]
NEW_TOKENS = 40
NEAR_TIE = 1e-4
FILTERS = {
    "none": {},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def kept_tokens(scores: list[float], sampling: SamplingParams) -> list[int]:
    """Apply top-k, then top-p and min-p to the renormalised rest. The best token always stays."""
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    ranked = ranked[: sampling.top_k] if sampling.top_k else ranked
    weights = [math.exp(scores[token] - scores[ranked[0]]) for token in ranked]
    probs = [weight / sum(weights) for weight in weights]
    kept, before = [], 0.0
    for token, prob in zip(ranked, probs, strict=True):
        if not kept or (before < sampling.top_p and prob >= sampling.min_p * probs[0]):
            kept.append(token)
        before += prob
    return kept


def sample(model: LlamaForCausalLM, sampling: SamplingParams) -> tuple[list[int], float]:
    """Return the tokens after `PROMPT` by the formula, and the smallest margin by which one of them won."""
    tokens, narrowest = list(PROMPT), math.inf
    for position in range(len(PROMPT), len(PROMPT) + NEW_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].tolist()
        scores = [logit / sampling.temperature for logit in logits]
        noisy = sorted(
            (
                (scores[token] + gumbel(sampling.seed, position, sampling.choice_index, token), token)
                for token in kept_tokens(scores, sampling)
            ),
            reverse=True,
        )
        if len(noisy) > 1:
            narrowest = min(narrowest, noisy[0][0] - noisy[1][0])
        tokens.append(noisy[0][1])
    return tokens[len(PROMPT) :], narrowest


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)


@pytest.fixture(scope="module")
def model(target_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def decoder(target_dir: Path) -> Decoder:
    return load_toy(target_dir)


@pytest.mark.parametrize("choice_index", [0, 2])
@pytest.mark.parametrize("filters", list(FILTERS.values()), ids=list(FILTERS))
def test_sampled_output_is_the_specified_formulas(
    model: LlamaForCausalLM, decoder: Decoder, filters: dict[str, float], choice_index: int
) -> None:
    options = {"temperature": 1.0, "seed": 0xFEDCBA9876543210, **filters}
    sampling = SamplingParams(choice_index=choice_index, **options)  # type: ignore[arg-type]
    expected, narrowest = sample(model, sampling)
    assert narrowest > NEAR_TIE, "a near-tie does not guarantee equality; choose another seed"

    plain = make_harness(decoder, NoDrafter())
    plain.submit(PROMPT, NEW_TOKENS, request_id="off", sampling=sampling, mode=SpeculationMode.OFF)
    plain.run()
    assert plain.sink.tokens["off"] == expected

    drafted = make_harness(decoder, FakeDrafter(oracle_plan([PROMPT + expected], VOCAB, 0.8)))
    drafted.submit(PROMPT, NEW_TOKENS, request_id="on", sampling=sampling, shape=(5, 4, 16))
    drafted.run()
    assert drafted.sink.tokens["on"] == expected
    assert drafted.sink.finished["on"].speculation.accepted_tokens > 0


def test_the_formula_tells_positions_and_choices_apart() -> None:
    assert len({gumbel(7, position, choice, 3) for position in range(4) for choice in range(4)}) == 16
