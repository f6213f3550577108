"""Tensor parallelism over two processes (gloo on a CPU): the logits and tokens equal those of one process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine.parallel_ranks import exit_codes
from support.engine.target_harness import (
    FakeDrafter,
    assert_same_tokens,
    load_toy,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.grammars.toy_grammar import ToyGrammar
from support.models.toys import make_toy_eagle3, make_toy_target
from support.outputs.parity_faults import FAULTS, check, planted, runner_of

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.parallel.group import RankGroup, start_group
from outrider.services.target.settings import TargetSettings
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogitRules
from outrider.shared.nn.decoder import LM_HEAD, Decoder
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.spec.drafter import FeatureSpec

torch.set_num_threads(1)
VOCAB, HIDDEN = 97, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model whose single KV head is shared by both ranks, with a vocabulary that needs padding."""
    return make_toy_target(
        tmp_path_factory.mktemp("tp"),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=1,
        planted=2.5,
        seed=5,
    )


@pytest.fixture(scope="module")
def whole(folder: Path) -> Decoder:
    return load_toy(folder)


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[RankGroup]:
    failures: list[OutriderError] = []
    group = start_group(TargetSettings(model=folder, device="cpu", tp=2, threads=1), failures.append)
    yield group
    pids = group.process_ids
    group.close()
    assert exit_codes(group) == [0], "rank 1 must exit by itself"
    assert failures == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def prompts(count: int = 3) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(3, 40))] for _ in range(count)]


def test_logits_and_captured_states_equal_those_of_one_process(whole: Decoder, group: RankGroup) -> None:
    found = []
    for decoder in (whole, group.decoder):
        pool, attention = decoder.make_pool(16, 16), create_backend("auto", "cpu")
        leases = [lease for lease in (pool.lease(48), pool.lease(48)) if lease is not None]
        tokens = [prompts(2)[0][:3] * 3, prompts(2)[1][:3] * 11]
        attention.plan(build_batch(pool, leases, [0, 0], [9, 33]))
        positions = torch.cat([torch.arange(9), torch.arange(33)])
        output = decoder.forward(torch.tensor(tokens[0] + tokens[1]), positions, attention, pool, (1, 3))
        spec = FeatureSpec(aux_layer_ids=(1, 3), feature_size=2 * HIDDEN)
        features = FeatureProjector(spec, "cpu", torch.float32, hidden_size=HIDDEN, num_layers=8)(output)
        found.append((decoder.logits(output.hidden), decoder.logits(output.hidden[[8, 41]]), features))
        attention.plan(build_batch(pool, leases, [9, 33], [1, 1]))  # after the stored tokens
        step = decoder.forward(torch.tensor([1, 2]), torch.tensor([9, 33]), attention, pool)
        found[-1] += (decoder.logits(step.hidden),)
    for want, got in zip(*found, strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), float((got - want).abs().max())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=9),
        SamplingParams(temperature=0.0, rules=LogitRules(0.5, 1.0, 1.2, logit_bias=((3, 2.0),))),
    ],
    ids=["greedy", "sampled", "filtered", "ruled"],
)
def test_tokens_equal_those_of_one_process_with_and_without_speculation(
    sampling: SamplingParams, whole: Decoder, group: RankGroup
) -> None:
    expected = []
    for prompt in prompts():
        alone = make_harness(whole, NoDrafter())
        alone.submit(prompt, 40, request_id="plain", mode=SpeculationMode.OFF, sampling=sampling)
        alone.run()
        expected.append(alone.sink.tokens["plain"])
    truth = [prompt + answer for prompt, answer in zip(prompts(), expected, strict=True)]
    for plan in (oracle_plan(truth, VOCAB, 0.7), random_plan(VOCAB)):
        harness = make_harness(
            group.decoder,
            FakeDrafter(plan, FeatureSpec(aux_layer_ids=(1,), feature_size=HIDDEN)),
            num_pages=64,
        )
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, 40, request_id=f"off {index}", mode=SpeculationMode.OFF, sampling=sampling)
            harness.submit(prompt, 40, request_id=f"on {index}", shape=(5, 3, 12), sampling=sampling)
        harness.run()
        for index, prompt in enumerate(prompts()):
            for kind in ("off", "on"):
                assert_same_tokens(
                    whole, prompt, expected[index], harness.sink.tokens[f"{kind} {index}"], sampling
                )
    assert harness.sink.finished["on 0"].speculation.rounds > 0


def test_a_head_on_rank_0_drafts_as_for_one_process(
    whole: Decoder, group: RankGroup, folder: Path, tmp_path: Path
) -> None:
    head = make_toy_eagle3(
        tmp_path / "head", folder, planted=2.5, aux_layers=[1, 3, 4], intermediate_size=128
    )
    found = []
    for decoder in (whole, group.decoder):
        drafter = drafter_beside(
            decoder, DraftSettings.load({"draft": head, "target_weights": folder, "device": "cpu"})
        )
        harness = make_harness(decoder, drafter)
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, 40, request_id=str(index), shape=(4, 2, 9))
        harness.run()
        drafter.shutdown()
        finished = [harness.sink.finished[str(index)].speculation for index in range(3)]
        found.append((harness.sink.tokens, [(report.rounds, report.accepted_tokens) for report in finished]))
    assert found[0] == found[1]
    assert sum(accepted for _, accepted in found[0][1]) > 0


def test_weights_that_a_draft_borrows_are_whole(whole: Decoder, group: RankGroup) -> None:
    for name in ("model.embed_tokens.weight", LM_HEAD):
        assert torch.equal(group.decoder.weight(name), whole.weight(name))


def test_pages_are_scrubbed_on_every_rank(group: RankGroup) -> None:
    decoder = group.decoder
    pool, attention = decoder.make_pool(4, 16), create_backend("auto", "cpu")
    lease = pool.lease(16)
    assert lease is not None

    def logits(tokens: list[int], start: int) -> torch.Tensor:
        attention.plan(build_batch(pool, [lease], [start], [len(tokens)]))
        return decoder.logits(
            decoder.forward(
                torch.tensor(tokens), torch.arange(start, start + len(tokens)), attention, pool
            ).hidden
        )

    fresh = logits([7], 4)  # over four tokens of zeros
    logits([1, 2, 3, 4], 0)
    assert not torch.equal(logits([7], 4), fresh)
    pool.scrub(torch.tensor(lease.pages))
    assert torch.equal(logits([7], 4), fresh)


def test_the_parity_check_runs_on_all_ranks(group: RankGroup) -> None:
    runner = runner_of(group.decoder)
    result = check(runner)
    assert result is not None
    assert result.passed
    for fault in ("no mask", "pages of another sequence"):
        with planted(runner, FAULTS[fault]), pytest.raises(OutriderError, match="explains at most"):
            check(runner)


@pytest.mark.parametrize(
    ("tp", "field"), [(3, "num_attention_heads 4 of the model"), (8, "num_attention_heads 4 of the model")]
)
def test_heads_that_do_not_divide_are_refused_before_anything_starts(
    tp: int, field: str, folder: Path
) -> None:
    with pytest.raises(ConfigurationError, match=field):
        start_group(TargetSettings(model=folder, device="cpu", tp=tp))


def test_forms_of_outputs_hold_on_two_ranks(whole: Decoder, group: RankGroup) -> None:
    grammars = [ToyGrammar(VOCAB, (5, 9), seed) for seed in range(3)]
    expected = []
    for prompt, grammar in zip(prompts(), grammars, strict=True):
        alone = make_harness(whole, NoDrafter())
        alone.submit(prompt, 20, request_id="plain", mode=SpeculationMode.OFF, grammar=grammar)
        alone.run()
        expected.append(alone.sink.tokens["plain"])
    spec = FeatureSpec(aux_layer_ids=(1,), feature_size=HIDDEN)
    harness = make_harness(group.decoder, FakeDrafter(random_plan(VOCAB), spec), num_pages=64)
    for index, (prompt, grammar) in enumerate(zip(prompts(), grammars, strict=True)):
        harness.submit(prompt, 20, request_id=str(index), shape=(5, 3, 12), grammar=grammar)
    harness.run()
    assert list(harness.sink.tokens.values()) == expected
