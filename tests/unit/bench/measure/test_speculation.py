"""`outrider bench speculation`: paired ratios, differing texts, near-ties and prompt files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.bench.measure.near_tie import NEAR_TIE, Judge
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, load_prompts
from outrider.bench.measure.speculation import (
    TEMPERATURES,
    MeasuredRequest,
    RunKind,
    Runs,
    first_differences,
    summarise_runs,
)
from outrider.bench.options import result_file
from outrider.bench.report.machine import describe_machine
from outrider.services.gateway.tokenizer import TextCodec
from outrider.services.hub.pair import DEMO_TARGET
from outrider.shared.base.errors import ConfigurationError


def runs_of(speeds: dict[RunKind, list[float]]) -> Runs:
    """Return runs of 100 tokens at the given speeds, the same at both temperatures."""
    return {
        (index, temperature, kind): MeasuredRequest(
            index, temperature, kind, 100, 100 / speed, 0.01, 3.0 + index, 30, [index]
        )
        for kind, values in speeds.items()
        for index, speed in enumerate(values)
        for temperature in TEMPERATURES
    }


def test_ratios_are_paired_by_prompt() -> None:
    # The machine is half as fast for the second and third prompts, which distorts medians but not ratios.
    runs = runs_of(
        {
            RunKind.ON: [200, 100, 130],
            RunKind.AUTO: [150, 50, 50],
            RunKind.OFF: [100, 50, 50],
            RunKind.NO_DRAFT: [100, 50, 40],
        }
    )
    row = summarise_runs(runs, 3)[0]
    assert row["temperature"] == 0.0
    assert row["on_over_off"] == {"median": 2.0, "p25": 2.0, "p75": 2.3, "floor": 4.0, "ratio": 2.0}, (
        "the ratio cannot exceed the accept length"
    )
    assert row["auto_over_off"]["median"] == 1.0
    assert row["off_over_no_draft"]["median"] == 1.0
    assert row["off_over_no_draft"]["floor"] == 1.0
    assert row["tokens_per_s"] == {"on": 130.0, "auto": 50.0, "off": 50.0, "no_draft": 50.0}
    assert row["accept_length"] == {"on": 4.0, "auto": 4.0}
    assert row["same_text"] == {"on": 3, "auto": 3}


def test_different_texts_are_counted() -> None:
    runs = runs_of({kind: [10.0, 10.0] for kind in RunKind})
    runs[1, 1.0, RunKind.OFF] = MeasuredRequest(1, 1.0, RunKind.OFF, 100, 10.0, 0.01, 0.0, 100, [9])
    assert [row["same_text"]["on"] for row in summarise_runs(runs, 2)] == [2, 1]


def test_where_greedy_answers_part_the_logits_are_told() -> None:
    prompts = load_prompts(HELDOUT_PROMPTS, 2)
    runs = runs_of({kind: [10.0, 10.0] for kind in RunKind})
    assert first_differences(runs, prompts, DEMO_TARGET) == []
    ids = TextCodec.load(DEMO_TARGET).encode_chat(prompts[1], {})
    best, second, *_, worst = (
        int(token) for token in Judge(DEMO_TARGET).next_logits(ids).argsort(descending=True)
    )
    for kind, tokens in ((RunKind.OFF, [best, 7]), (RunKind.ON, [second, 9]), (RunKind.AUTO, [worst, 7])):
        runs[1, 0.0, kind] = replace(runs[1, 0.0, kind], token_ids=tokens)
    runs[0, 1.0, RunKind.ON] = replace(runs[0, 1.0, RunKind.ON], token_ids=[1])
    on, auto, sampled = sorted(
        first_differences(runs, prompts, DEMO_TARGET),
        key=lambda one: (one["temperature"], one["kind"] == "auto"),
    )
    assert (on["prompt"], on["token"], on["choices"]) == (1, 0, [best, second])
    assert [token for token, _logit in on["best_in_fp32"]] == [best, second]
    assert on["gap"] == pytest.approx(on["best_in_fp32"][0][1] - on["best_in_fp32"][1][1], abs=1e-3)
    assert on["near_tie"] == (on["gap"] <= on["allowed"])
    assert auto["gap"] > on["gap"]
    assert not auto["near_tie"]
    assert sampled == {"prompt": 0, "temperature": 1.0, "kind": "on"}, "sampled texts are not judged"


def test_two_unit_roundoffs_of_bf16_are_a_near_tie_and_more_is_none() -> None:
    assert torch.finfo(torch.bfloat16).eps == NEAR_TIE

    class Rigged(Judge):
        def __init__(self) -> None:
            self._codec = TextCodec.load(DEMO_TARGET)

        def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
            return torch.tensor([16.0, 16 * (1 - 2.0**-7), 16 * (1 - 2.0**-6)])

    partings = [Rigged().parting([{"role": "user", "content": "hi"}], [0], [other]) for other in (1, 2)]
    assert [parting.is_near_tie for parting in partings] == [True, False]


def test_prompts_are_messages_or_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": "hi"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    assert load_prompts(path, 2) == [[{"role": "user", "content": "hi"}], records[1]["messages"]]
    with pytest.raises(ConfigurationError, match="contains 2 prompts, fewer than --num-prompts 3"):
        load_prompts(path, 3)
    path.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigurationError, match=r"prompts.jsonl:1 has neither"):
        load_prompts(path, 1)
    with pytest.raises(ConfigurationError, match="Cannot read the prompts"):
        load_prompts(tmp_path / "none.jsonl", 1)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["packages"]["torch"]


def test_without_output_a_result_gets_a_new_file_outside_the_recorded_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "bench" / "results" / "speculation-cpu.json"
    recorded.parent.mkdir(parents=True)
    recorded.write_text("{}")
    monkeypatch.chdir(tmp_path)
    path = result_file(None, "speculation", "cpu", force=False)
    assert path.parent == Path("bench-results")
    assert re.fullmatch(r"speculation-cpu-\d{4}-\d\d-\d\dT\d{6}Z\.json", path.name)
    with pytest.raises(ConfigurationError, match=r"speculation-cpu\.json exists"):
        result_file(recorded.parent, "speculation", "cpu", force=False)
