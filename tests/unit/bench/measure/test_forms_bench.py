"""`outrider bench forms`: parts of answers, accept lengths, and a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench.measure.form_parts import Part, parts_of
from outrider.bench.measure.forms import (
    FORM_PROMPTS,
    FormAnswer,
    FormPrompt,
    load_form_prompts,
    rows_of,
)
from outrider.bench.measure.prompts import HELDOUT_PROMPTS
from outrider.services.cli.commands import app
from outrider.shared.base.errors import ConfigurationError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["a", "bc"]},
        "tool": {"const": "x"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "ok": {"type": "boolean"},
    },
}
TEXT = r'{"name": "A\"b", "kind": "bc", "tool": "x", "sizes": [1, 20], "note": null, "ok": true}'
LETTERS = {
    "s": Part.STRUCTURE,
    "t": Part.TEXT,
    "c": Part.CHOICE,
    "n": Part.NUMBER,
    "l": Part.LITERAL,
    "e": Part.CLOSING,
}


def test_every_character_of_an_answer_has_its_part() -> None:
    expected = "".join(
        (
            "s" * len('{"name": "') + "tttt" + "e",
            "s" * len(', "kind": "') + "cc" + "s",
            "s" * len(', "tool": "x"'),
            "s" * len(', "sizes": [') + "n" + "ee" + "nn" + "e",
            "s" * len(', "note": ') + "llll",
            "s" * len(', "ok": ') + "llll" + "s",
        )
    )
    assert parts_of(TEXT, SCHEMA) == [LETTERS[letter] for letter in expected]


@pytest.mark.parametrize("length", range(0, len(TEXT), 7))
def test_an_incomplete_answer_has_the_parts_of_its_beginning(length: int) -> None:
    assert parts_of(TEXT[:length], SCHEMA) == parts_of(TEXT, SCHEMA)[:length]


def test_the_accept_length_counts_the_tokens_of_rounds_only() -> None:
    prompt = FormPrompt("t", "p", {"type": "object", "properties": {"n": {"type": "integer"}}})
    answers = [
        FormAnswer(prompt, False, "Yes it is.", [[" it", " is"], [".", ""]], True),
        FormAnswer(prompt, True, '{"n": 12}', [['"', "n", '": '], ["1", "2", "}", ""]], True),
        FormAnswer(prompt, True, '{"n": 34', [['"n', '": ', "3", "4"]], False),
    ]
    rows = {row.case: row for row in rows_of(answers)}
    assert rows["free"].value == 2.0
    assert rows["schema"].value == rows["schema, t"].value == pytest.approx(11 / 3, abs=1e-3)
    assert rows["schema ÷ free"].value == pytest.approx(11 / 6, abs=1e-3)
    structure, number = (rows[f"schema, rounds that end in {name}"] for name in ("structure", "number"))
    assert structure.more == {"tokens": 7, "rounds": 2, "tokens_of_this_part": 6}
    assert number.more == {"tokens": 4, "rounds": 1, "tokens_of_this_part": 4}


def test_the_embedded_prompts_are_heldout_and_of_every_topic() -> None:
    prompts = load_form_prompts(FORM_PROMPTS, None)
    held = [json.loads(line) for line in HELDOUT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert {(one.topic, one.prompt) for one in prompts} <= {(one["topic"], one["prompt"]) for one in held}
    assert {one.topic for one in prompts} == {one["topic"] for one in held}
    assert len(load_form_prompts(FORM_PROMPTS, 7)) == 7


def test_errors_of_the_prompts_name_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Cannot read the prompts") as missing:
        load_form_prompts(tmp_path / "none.jsonl", None)
    assert missing.value.field == "--prompts"
    with pytest.raises(ConfigurationError, match="contains 40 prompts, but --num-prompts is 99") as few:
        load_form_prompts(FORM_PROMPTS, 99)
    assert few.value.field == "--num-prompts"
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x", "topic": "y"}\n')
    with pytest.raises(ConfigurationError, match=r"p\.jsonl:1 has no field schema"):
        load_form_prompts(file, None)


def test_a_run_writes_both_accept_lengths(tmp_path: Path) -> None:
    out = tmp_path / "forms.json"
    flags = ["--num-prompts", "1", "--tokens", "40", "--device", "cpu", "--transport", "inproc"]
    flags += ["--output", str(out)]
    result = CliRunner().invoke(app, ["bench", "forms", *flags])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    rows = {row["case"]: row for row in written["rows"]}
    assert "schema ÷ free" in result.output
    assert rows["free"]["value"] > 1.5
    assert rows["schema"]["value"] > 1.5
    free, formed = written["answers"]
    assert free["schema"] is None
    assert formed["text"].startswith('{"')
    assert rows["schema"]["tokens"] == sum(formed["tokens_of_rounds"]) <= 40
    assert written["settings"]["num_draft_tokens"] == 16


def test_a_server_without_a_draft_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "forms", "--draft", "none"])
    assert isinstance(result.exception, ConfigurationError)
    assert result.exception.field == "--draft"
