"""Random JSON schemas on the embedded pair: the texts are valid, and equal with and without speculation.

`make test-schemas` runs 1,000 schemas. CI runs a few, with each grammar library.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from support.engine.target_harness import Harness, assert_same_tokens, load_toy, make_harness
from support.grammars.random_schemas import random_schema
from support.suite.compute_device import DEVICE
from tokenizers import Tokenizer

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.grammar.backend import GrammarBackend, compile_grammar
from outrider.services.target.grammar.matcher import Grammar
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.services.target.grammar.xgrammar import XGrammar
from outrider.services.target.model import tree_fit
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
TARGET, HEAD = ROOT / "models" / "demo" / "target", ROOT / "models" / "demo" / "eagle3"
SCHEMAS = int(os.environ.get("OUTRIDER_SCHEMAS", "12"))
GROUP = 12
NEW_TOKENS = 300
PROMPTS = ("Describe a city as JSON.", "A record of a person:", "Give me some data.")
SHAPES = (
    (SpeculationMode.ON, (5, 1, 6)),
    (SpeculationMode.ON, (4, 3, 12)),
    (SpeculationMode.AUTO, (5, 4, 16)),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_toy(TARGET)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(decoder: Decoder) -> Vocabulary:
    return Vocabulary(TARGET / "tokenizer.json", decoder.config.vocab_size, (2,))


def make_pair(decoder: Decoder) -> tuple[Harness, Any]:
    settings = DraftSettings.load({"draft": HEAD, "device": str(DEVICE), "kv_tokens": 32768})
    drafter = drafter_beside(decoder, settings)
    plan = LoopPlan(drafts_on_device=True)
    return make_harness(decoder, drafter, plan=plan, eos=[2], num_pages=1024, max_running=GROUP), drafter


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids)


@pytest.mark.parametrize("backend", [GrammarBackend.LLGUIDANCE, GrammarBackend.AUTO])
@pytest.mark.parametrize("group", range(-(-SCHEMAS // GROUP)))
def test_texts_match_their_schemas_and_do_not_depend_on_speculation(
    decoder: Decoder, tokenizer: Tokenizer, vocabulary: Vocabulary, group: int, backend: GrammarBackend
) -> None:
    rng = random.Random(group)
    harness, drafter = make_pair(decoder)
    asked: list[tuple[dict[str, Any], Grammar, list[int], SamplingParams]] = []
    for index in range(GROUP):
        schema = random_schema(rng)
        asks = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
        grammar = compile_grammar(asks, vocabulary, backend)
        sampling = SamplingParams((0.0, 0.7, 1.0)[index % 3], seed=index)
        asked.append((schema, grammar, chat(tokenizer, rng.choice(PROMPTS)), sampling))
    for speculates in (False, True):
        for index, (_, grammar, prompt, sampling) in enumerate(asked):
            mode, shape = SHAPES[index // 3 % 3] if speculates else (SpeculationMode.OFF, (1, 1, 2))
            harness.submit(
                prompt,
                NEW_TOKENS,
                request_id=f"{index}{'on' if speculates else 'off'}",
                sampling=sampling,
                mode=mode,
                shape=shape,
                grammar=grammar,
            )
        harness.run()
    drafter.shutdown()
    assert not harness.sink.failed
    complete = 0
    for index, (schema, _, prompt, sampling) in enumerate(asked):
        off, on = (harness.sink.tokens[f"{index}{name}"] for name in ("off", "on"))
        assert_same_tokens(decoder, prompt, off, on, sampling)
        for tokens, name in ((off, "off"), (on, "on")):
            if harness.sink.finished[f"{index}{name}"].reason is FinishReason.STOP:
                value = json.loads(tokenizer.decode(tokens))
                assert jsonschema_rs.is_valid(schema, value, validate_formats=True), (schema, value)
                complete += 1
    by_xgrammar = sum(isinstance(grammar, XGrammar) for _, grammar, _, _ in asked)
    assert (by_xgrammar > 0) == backend.uses_xgrammar
    assert complete >= 2 * GROUP - 6, "most texts are short enough to end"


def test_text_that_the_schema_forces_makes_accepted_runs_longer(
    decoder: Decoder, tokenizer: Tokenizer, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "country": {"type": "string", "maxLength": 16},
            "population": {"type": "integer", "minimum": 0, "maximum": 99},
            "coastal": {"type": "boolean"},
        },
        "required": ["country", "population", "coastal"],
        "additionalProperties": False,
    }
    asks = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    grammar = compile_grammar(asks, vocabulary, GrammarBackend.LLGUIDANCE)
    lengths, texts = [], []
    for fits in (True, False):
        if not fits:
            monkeypatch.setattr(tree_fit._Fit, "fill", lambda self: None)
        harness, drafter = make_pair(decoder)
        for index in range(4):
            prompt = chat(tokenizer, PROMPTS[index % 3])
            sampling = SamplingParams(float(index % 2), seed=index)
            harness.submit(
                prompt, 60, request_id=str(index), sampling=sampling, shape=(5, 4, 16), grammar=grammar
            )
        harness.run()
        drafter.shutdown()
        assert not harness.sink.failed
        done = [one.speculation for one in harness.sink.finished.values()]
        lengths.append(1 + sum(one.accepted_tokens for one in done) / sum(one.rounds for one in done))
        texts.append(harness.sink.tokens)
    assert texts[0] == texts[1]
    assert lengths[0] > 1.3 * lengths[1]
