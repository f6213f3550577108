"""`outrider tune` against a running stack: its profile sets the mode and the shape that it found."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.services.stack import Stack
from typer.testing import CliRunner

from outrider.services.cli.commands import app
from outrider.services.tune import run_count, search
from outrider.shared.spec.tree import DraftShape

SEARCH_S = 240
pytestmark = pytest.mark.parametrize("transport", ["grpc"], indirect=True)


def tune(stack: Stack, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.services.cli", "tune", "--url", stack.base_url]
    sizes = ["--batches", "1,2", "--num-prompts", "2", "--tokens", "32"]
    return subprocess.run(
        [*command, *sizes, "--output", str(output), *flags], capture_output=True, text=True, timeout=SEARCH_S
    )


def test_the_profile_has_the_best_mode_and_shape(stack: Stack, tmp_path: Path) -> None:
    output = tmp_path / "profile.toml"
    done = tune(stack, output, "--json", "--plot", str(tmp_path / "speed.svg"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["batch"] for one in found["batches"]] == [1, 2]
    for one in found["batches"]:
        assert set(one["tokens_per_s"]) > {"plain"}
        assert all(speed > 0 for speed in one["tokens_per_s"].values())
    # The embedded head is good, so deeper chains are expected to accept more.
    assert found["accept_lengths"]["chain 5"] > found["accept_lengths"]["chain 1"] > 1.5
    for theme in ("light", "dark"):
        assert "chain" in (tmp_path / f"speed-{theme}.svg").read_text()
    profile = tomllib.loads(output.read_text())
    assert profile == found["profile"]
    assert profile["speculation_mode"] == found["mode"]
    # Which mode is best depends on measured times.
    shape = {"auto": found["limits"], "on": found["shape"], "off": {}}[found["mode"]]
    assert profile == {"speculation_mode": found["mode"], **shape}
    assert all(one["tokens_per_s"]["auto"] > 0 for one in found["batches"])
    assert all(one["best"] in one["contenders"] for one in found["batches"] if one["best"] != "plain")


def test_a_check_compares_the_choice_with_the_best_of_all_shapes(stack: Stack, tmp_path: Path) -> None:
    short = ["--batches", "1", "--num-prompts", "1", "--tokens", "8"]
    done = tune(stack, tmp_path / "profile.toml", *short, "--check", "2", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["batches"]
    check = found["check"]
    assert check["choice"] == found["best"]
    assert len(check["ratios"]) == 2
    assert check["ratio"] == 1 or check["choice"] != check["best_of_all"]
    assert found["exhaustive_seconds"] > 3 * check["seconds_of_all"] > 0
    assert found["share_of_exhaustive"] > 0


def test_without_a_url_a_server_of_the_pair_is_started(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--exhaustive` measures every shape, so the answers are short and there are only a few shapes."""
    shapes = [
        DraftShape(1, 1, 2),
        DraftShape(2, 1, 3),
        DraftShape(2, 2, 5),
        DraftShape(3, 2, 8),
        DraftShape(5, 1, 6),
    ]
    for module in (search, run_count):
        monkeypatch.setattr(module, "candidate_shapes", lambda largest: shapes)
    measured: list[DraftShape] = []
    measure = search.measure_paired

    def noted(run: Any, asked: Sequence[DraftShape], *passes: int) -> Any:
        measured.extend(asked)
        return measure(run, asked, *passes)

    monkeypatch.setattr(search, "measure_paired", noted)
    output = tmp_path / "profile.toml"
    sizes = ["--batches", "1", "--num-prompts", "1", "--tokens", "8", "--exhaustive", "--output", str(output)]
    done = CliRunner().invoke(app, ["tune", "--device", "cpu", *sizes])
    assert done.exit_code == 0, done.output
    assert set(shapes) < set(measured)
    # Which shapes are in the table, and whether one of them is faster than plain decoding, depends on times.
    assert "best mode: " in done.stdout
    assert output.read_text().startswith("# Written by `outrider tune`.")


def test_a_wrong_list_of_batches_names_the_flag(stack: Stack, tmp_path: Path) -> None:
    done = tune(stack, tmp_path / "profile.toml", "--batches", "0")
    assert done.returncode == 2
    assert "--batches '0' is not a list of numbers" in done.stderr
