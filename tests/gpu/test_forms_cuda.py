"""Outputs with a form beside others, with CUDA graphs and a draft on the device, on the demo pair."""

from __future__ import annotations

import json

import pytest
import torch
from support.gpu_pair import TARGET, make_pair_drafter
from support.target_harness import assert_same_tokens, generate_plain, make_harness

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.grammar.guidance import Vocabulary, compile_grammar
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.generation import SamplingParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.open import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "coastal": {"type": "boolean"}},
    "required": ["name", "coastal"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("graphs", [False, True])
def test_forms_emit_plain_tokens_beside_free_outputs(graphs: bool) -> None:
    decoder = load_decoder(TARGET, "cuda", torch.float32)
    drafter = make_pair_drafter(decoder)
    vocabulary = Vocabulary(TARGET / "tokenizer.json", decoder.config.vocab_size, (2,))
    grammar = compile_grammar(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), vocabulary)
    cache = GraphCache(decoder.device, enabled=graphs)
    plan = LoopPlan(lookahead=1, drafts_on_device=True)
    harness = make_harness(decoder, drafter, plan=plan, graphs=cache, max_running=4, eos=[2])
    prompts = [[(7 * index + step) % 200 for step in range(20)] for index in range(6)]
    samplings = [SamplingParams([0.0, 0.7, 1.0][index % 3], seed=index) for index in range(6)]
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        form = grammar if index % 2 else None
        harness.submit(prompt, 50, request_id=str(index), sampling=sampling, grammar=form)
    harness.run()
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        form = grammar if index % 2 else None
        options = {"sampling": sampling, "grammar": form, "stop": [2]}
        plain = generate_plain(decoder, NoDrafter(decoder.device), prompt, 50, **options)
        if form is None:
            assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
        else:
            assert harness.sink.tokens[str(index)] == plain
    drafter.shutdown()
