"""Tensor parallelism for all kinds of models and KV caches: the tokens equal those of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    assert_same_tokens,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.models import toy_deepseek
from support.models.family_models import VOCAB, WINDOW, save
from support.outputs.prefix_parity import ParityCase

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.model.token_states import sparse_layers
from outrider.services.target.parallel.group import start_group
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_attention, prepare_decoder
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.base.token_states import StateParams, TokenStates, join_states
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Drafter

torch.set_num_threads(1)
NEW_TOKENS = 24
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-fp8-cache": ("llama", {"kv_cache_dtype": "fp8_e4m3"}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss-fp8-cache": ("gpt-oss-narrow", {"kv_cache_dtype": "fp8_e4m3"}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),
    "deepseek-v3": ("deepseek-v3", {}),
}


def prompts(vocabulary: int = VOCAB) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in (3, WINDOW + 9)]


@contextmanager
def spread_over_two(settings: TargetSettings) -> Iterator[Decoder]:
    failures: list[OutriderError] = []
    group = start_group(settings, failures.append)
    try:
        yield group.decoder
    finally:
        group.close()
    assert failures == []


def test_deepseek_mtp_layers_on_rank_0_draft_as_for_one_process(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        folder = toy_deepseek.save(toy_deepseek.Model(mtp_layers=1), tmp_path / "model")
    draft = DraftSettings.load(
        {"target_weights": folder, "kv_tokens": 4096, "page_size": 4, "speculative_algorithm": "MTP"}
    )

    def rounds(decoder: Decoder) -> list[tuple[list[int], int, int, int]]:
        drafter = drafter_beside(decoder, draft)
        harness = make_harness(decoder, drafter, num_pages=96, page_size=4)
        for index, prompt in enumerate(prompts(toy_deepseek.VOCAB)):
            harness.submit(prompt, NEW_TOKENS, request_id=str(index), shape=(3, 2, 8))
        harness.run()
        drafter.shutdown()
        reports = [
            (harness.sink.tokens[str(index)], harness.sink.finished[str(index)].speculation)
            for index in range(2)
        ]
        return [(tokens, one.rounds, one.draft_tokens, one.accepted_tokens) for tokens, one in reports]

    with spread_over_two(TargetSettings(model=folder, device="cpu", tp=2, threads=1)) as ranks:
        found = rounds(ranks)
    assert found == rounds(load_decoder(folder, "cpu"))
    assert all(draft_tokens > 0 for _, _, draft_tokens, _ in found)


@dataclass(frozen=True)
class Spread:
    """One model in one process (`whole`) and over two (`decoder`), with the settings of both."""

    settings: TargetSettings
    whole: Decoder
    decoder: Decoder

    def harness(self, decoder: Decoder, drafter: Drafter, **options: int) -> Harness:
        sizes = {"num_pages": 96, "page_size": 4, "prefill_chunk": 32, **options}
        return make_harness(decoder, drafter, attention=prepare_attention(self.settings, decoder), **sizes)


@pytest.fixture(scope="module", params=CASES)
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    family, values = CASES[request.param]
    folder = save(family, tmp_path_factory.mktemp("models"))
    settings = TargetSettings.load({"model": folder, "device": "cpu", "tp": 2, "threads": 1, **values})
    whole = prepare_decoder(settings, load_decoder(folder, "cpu"))
    with spread_over_two(settings) as ranks:
        yield Spread(settings, whole, prepare_decoder(settings, ranks))


def test_tokens_equal_those_of_one_process_with_and_without_speculation(spread: Spread) -> None:
    whole, sampled = spread.whole, SamplingParams(temperature=0.9, seed=7)
    expected = []
    for prompt in prompts():
        alone = spread.harness(whole, NoDrafter())
        alone.submit(prompt, NEW_TOKENS, request_id="greedy", mode=SpeculationMode.OFF)
        alone.submit(prompt, NEW_TOKENS, request_id="sampled", mode=SpeculationMode.OFF, sampling=sampled)
        alone.run()
        expected.append(alone.sink.tokens)
    truth = [prompt + answers["greedy"] for prompt, answers in zip(prompts(), expected, strict=True)]

    for name, plan in {"oracle": oracle_plan(truth, VOCAB, 0.7), "garbage": random_plan(VOCAB)}.items():
        harness = spread.harness(spread.decoder, FakeDrafter(plan))
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, NEW_TOKENS, request_id=f"off {index}", mode=SpeculationMode.OFF)
            harness.submit(prompt, NEW_TOKENS, request_id=f"on {index}", shape=(5, 3, 12))
            harness.submit(
                prompt, NEW_TOKENS, request_id=f"sampled {index}", shape=(4, 1, 5), sampling=sampled
            )
        harness.run()
        for index, answers in enumerate(expected):
            for kind in ("off", "on", "sampled"):
                rule = sampled if kind == "sampled" else None
                want = answers["sampled" if rule else "greedy"]
                assert_same_tokens(
                    whole, prompts()[index], want, harness.sink.tokens[f"{kind} {index}"], rule
                )
        accepted = harness.sink.finished["on 0"].speculation.accepted_tokens
        assert accepted > (NEW_TOKENS // 3 if name == "oracle" else -1)


def test_states_are_those_of_one_process(spread: Spread) -> None:
    wanted = StateParams(hidden_states=True, routed_experts=bool(sparse_layers(spread.whole)))
    prompt, named = prompts()[1], LogprobParams(top=0, token_ids=(3, 90))

    def states(decoder: Decoder, drafter: Drafter) -> tuple[list[int], TokenStates, torch.Tensor]:
        harness = spread.harness(decoder, drafter)
        shape: Any = {"shape": (5, 3, 12)} if isinstance(drafter, FakeDrafter) else {}
        harness.submit(prompt, 12, request_id="r", states=wanted, logprobs=named, **shape)
        harness.run()
        logprobs = torch.tensor([one.requested for one in harness.sink.logprobs["r"]])
        return harness.sink.tokens["r"], join_states(harness.sink.states["r"]), logprobs

    tokens, expected, logprobs = states(spread.whole, NoDrafter())
    drafter = FakeDrafter(oracle_plan([[*prompt, *tokens]], VOCAB, 0.7))
    found_tokens, found, found_logprobs = states(spread.decoder, drafter)
    assert found_tokens == tokens
    assert (found.first, found.count) == (0, len(prompt) + 11)
    assert found.routed_experts == expected.routed_experts
    one, other = (np.frombuffer(each.hidden_states, "<f4") for each in (found, expected))
    np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found_logprobs, logprobs, atol=1e-3, rtol=0)


def test_stored_prefixes_change_no_token_on_two_ranks(spread: Spread) -> None:
    def make(drafter: Drafter, **options: int) -> Harness:
        return spread.harness(spread.decoder, drafter, **options)

    case = ParityCase(make, spread.whole)
    case.check_hits()
    case.check_preemption()
