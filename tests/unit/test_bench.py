"""The arithmetic and the input of `outrider bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.machine import describe_machine
from outrider.bench.speculation import TEMPERATURES, Kind, Run, Runs, first_differences, load_prompts, summarise
from outrider.shared.base.errors import ConfigurationError


def runs_of(speeds: dict[Kind, list[float]]) -> Runs:
    """Runs of 100 tokens at the given speeds, alike at both temperatures."""
    return {
        (index, temperature, kind): Run(index, temperature, kind, 100, 100 / speed, 0.01, 3.0 + index, 30, f"text {index}")
        for kind, values in speeds.items()
        for index, speed in enumerate(values)
        for temperature in TEMPERATURES
    }


def test_ratios_are_paired_by_prompt() -> None:
    # The machine is half as fast for the second and third prompt: medians of speeds would mislead, pairs do not.
    runs = runs_of({Kind.ON: [200, 100, 130], Kind.AUTO: [150, 50, 50], Kind.OFF: [100, 50, 50], Kind.NO_DRAFT: [100, 50, 40]})
    row = summarise(runs, 3)[0]
    assert row["temperature"] == 0.0
    assert row["on_over_off"] == {"median": 2.0, "p25": 2.0, "p75": 2.3}
    assert row["auto_over_off"]["median"] == 1.0
    assert row["off_over_no_draft"]["median"] == 1.0
    assert row["tokens_per_s"] == {"on": 130.0, "auto": 50.0, "off": 50.0, "no_draft": 50.0}
    assert row["accept_length"] == {"on": 4.0, "auto": 4.0}
    assert row["same_text"] == {"on": 3, "auto": 3}


def test_different_texts_are_counted() -> None:
    runs = runs_of({kind: [10.0, 10.0] for kind in Kind})
    runs[1, 1.0, Kind.OFF] = Run(1, 1.0, Kind.OFF, 100, 10.0, 0.01, 0.0, 100, "another text")
    assert [row["same_text"]["on"] for row in summarise(runs, 2)] == [2, 1]


def test_the_place_of_a_difference_is_told() -> None:
    runs = runs_of({kind: [10.0, 10.0] for kind in Kind})
    assert first_differences(runs) == []
    runs[1, 0.0, Kind.AUTO] = Run(1, 0.0, Kind.AUTO, 100, 10.0, 0.01, 0.0, 100, "text one")
    assert first_differences(runs) == [{"prompt": 1, "temperature": 0.0, "kind": "auto", "character": 5, "off": "1", "auto": "one"}]


def test_prompts_are_messages_or_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": "hi"}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    assert load_prompts(path, 2) == [[{"role": "user", "content": "hi"}], records[1]["messages"]]
    with pytest.raises(ConfigurationError, match="holds 2 prompts, fewer than --num-prompts 3"):
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
