"""Rounds with rules and logprobs as CUDA graphs, beside rounds without, on the demo pair."""

from __future__ import annotations

import pytest
import torch
from support.drafts.gpu_pair import TARGET, make_pair_drafter
from support.engine.target_harness import assert_same_tokens, generate_plain, make_harness

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.packed_batch import SamplingMode
from outrider.shared.base.generation import SamplingParams
from outrider.shared.base.logit_rules import LogitRules, LogprobParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.open import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
RULES = LogitRules(0.5, 0.6, 1.2, logit_bias=((5, 3.0), (17, -100.0)), bad_words=((9,), (11, 12)))
SAMPLINGS = (
    SamplingParams(temperature=0.0, rules=RULES),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, rules=RULES),
    SamplingParams(temperature=1.0, seed=5),
)


def test_graphs_with_rules_emit_plain_tokens_and_logprobs() -> None:
    decoder = load_decoder(TARGET, "cuda", torch.float32)
    drafter = make_pair_drafter(decoder)
    cache = GraphCache(decoder.device)
    plan = LoopPlan(lookahead=1, drafts_on_device=True)
    harness = make_harness(decoder, drafter, plan=plan, graphs=cache, max_running=4)
    prompts = [[(7 * index + step) % 200 for step in range(20)] for index in range(4)]
    wanted = LogprobParams(top=5, prompt_top=1)
    for repeat in range(3):
        for index, sampling in enumerate(SAMPLINGS):
            name = f"{repeat}-{index}"
            harness.submit(prompts[index], 60, request_id=name, sampling=sampling, logprobs=wanted)
        harness.run()
    assert any(isinstance(key, GraphKey) and key.mode is SamplingMode.FULL for key in cache.keys)
    for index, sampling in enumerate(SAMPLINGS):
        plain = generate_plain(decoder, NoDrafter(decoder.device), prompts[index], 60, sampling=sampling)
        for repeat in range(3):
            name = f"{repeat}-{index}"
            found = harness.sink.tokens[name]
            assert_same_tokens(decoder, prompts[index], plain, found, sampling)
            assert len(harness.sink.logprobs[name]) == len(found)
            assert len(harness.sink.prompt_logprobs[name]) == 19
            first, again = harness.sink.logprobs[f"0-{index}"], harness.sink.logprobs[name]
            assert [one.logprob for one in again] == pytest.approx([one.logprob for one in first], abs=1e-3)
    drafter.shutdown()
