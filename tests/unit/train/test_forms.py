"""Answers under random JSON schemas in the training of a head, and the sampling of the target's text."""

import json
from pathlib import Path
from random import Random

import jsonschema_rs
import pytest
import torch
from tokenizers import Tokenizer

from outrider.train.corpus.schemas import random_schema
from outrider.train.forms import FORBIDDEN, FormedAnswers, Forms, TokenSets, restricted
from outrider.train.generate import continue_rows
from outrider.train.model import Llama, read_trained_target
from outrider.train.tokenizer import END, START, render_prompt

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
TARGET = ROOT / "models" / "demo" / "target"
VOCAB = 4096


@pytest.fixture(scope="module")
def target() -> Llama:
    return read_trained_target(TARGET)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def rows_of(tokenizer: Tokenizer, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokenizer.encode(render_prompt("What is the capital of France?")).ids
    rows = torch.zeros(count, length, dtype=torch.long)
    rows[:, : len(ids)] = torch.tensor(ids)
    return rows, torch.full((count,), len(ids))


def test_schemas_are_a_function_of_the_seed_and_differ_from_the_measured_ones() -> None:
    schemas = [random_schema(Random(3)) for _ in range(2)]
    assert schemas[0] == schemas[1]
    rng = Random(3)
    trained = _names([random_schema(rng) for _ in range(500)])
    lines = (ROOT / "bench" / "prompts" / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
    measured = _names([json.loads(line)["schema"] for line in lines])
    assert len(trained) > 100
    assert len(measured) > 40
    assert not trained & measured


def _names(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_names, value))
    if not isinstance(value, dict):
        return set()
    return set(value.get("properties") or ()) | set().union(*map(_names, value.values()))


def test_answers_follow_their_schemas_in_every_turn(target: Llama, tokenizer: Tokenizer) -> None:
    rows, cuts = rows_of(tokenizer, 160, 6)
    schemas = [
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
            "required": ["city", "ok"],
            "additionalProperties": False,
        },
        {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
        | {"additionalProperties": False},
    ]
    forms = Forms.of(TARGET / "tokenizer.json", VOCAB, schemas)
    sets, header = TokenSets(VOCAB, "cpu"), tokenizer.encode(START + "assistant\n").ids
    answers = FormedAnswers(forms, sets, 0, cuts.tolist(), header)
    levels = torch.tensor([0.0, 0.0, 0.7, 0.7, 1.0, 1.0])
    found, allowed = continue_rows(target, rows, cuts, levels, 1, answers)
    assert torch.equal(found[:, : cuts[0]], rows[:, : cuts[0]])
    complete = 0
    for row, numbers, schema in zip(found, allowed, schemas * 3, strict=True):
        text = tokenizer.decode(row.tolist(), skip_special_tokens=False)
        for turn in text.split(START + "assistant\n")[1:]:
            if END in turn:
                assert jsonschema_rs.is_valid(schema, json.loads(turn.partition(END)[0])), turn
                complete += 1
        for position in range(int(cuts[0]), 160):
            mask = sets.table[numbers[position - 1]]
            token = int(row[position])
            assert int(mask[token // 32]) >> token % 32 & 1, "every token is among the allowed ones"
        assert numbers[0] == 0
        assert numbers[cuts[0] - 1] > 0
    assert complete >= 8, "some conversations have a second answer"


def test_sampled_text_is_random_and_greedy_text_is_the_most_likely(
    target: Llama, tokenizer: Tokenizer
) -> None:
    rows, cuts = rows_of(tokenizer, 40, 4)
    found, allowed = continue_rows(target, rows, cuts, torch.tensor([0.0, 1.0, 1.0, 1.0]), 5)
    assert not allowed.any()
    logits, _ = target(found[:1])
    first = int(cuts[0])
    assert torch.equal(found[0, first:], logits[0, first - 1 : -1].argmax(-1))
    again, _ = continue_rows(target, rows, cuts, torch.tensor([0.0, 1.0, 1.0, 1.0]), 5)
    assert torch.equal(found, again)
    assert "capital of France is Paris" in tokenizer.decode(found[0].tolist())
    other, _ = continue_rows(target, rows, cuts, torch.full((4,), 3.0), 6)
    assert len({tuple(row) for row in other.tolist()}) == 4


def test_only_allowed_tokens_keep_their_logits() -> None:
    table = torch.tensor([[-1, -1], [5, -(1 << 31)]], dtype=torch.int32)
    logits = torch.arange(120.0).view(2, 60) - 100
    found = restricted(logits, torch.tensor([0, 1], dtype=torch.int32), table)
    assert torch.equal(found[0], logits[0])
    assert (found[1] > FORBIDDEN).nonzero().flatten().tolist() == [0, 2]
    wide = restricted(torch.zeros(1, 64), torch.tensor([1]), table)
    assert (wide[0] > FORBIDDEN).nonzero().flatten().tolist() == [0, 2, 63]
