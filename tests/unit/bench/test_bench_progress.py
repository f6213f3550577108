"""Progress of benchmarks without a terminal: lines with the percentage and the time left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.services.cli.commands import app
from outrider.shared.obs import progress


@pytest.fixture(autouse=True)
def every_step_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)


def percentages(title: str, *arguments: str) -> list[int]:
    """Run a benchmark, and return the percentages of its lines about the progress."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return [int(one) for one in re.findall(rf"^{title}: (\d+) %, about \d+ s left$", result.output, re.M)]


def test_latency_tells_its_progress_after_each_run(tmp_path: Path) -> None:
    sizes = ("--shape", "tiny", "--device", "cpu", "--prompt", "8", "--new-tokens", "4", "--repeats", "1")
    kinds = ("--rounds", "plain", "--batch", "1", "--prefill", "8", "--output", str(tmp_path / "l.json"))
    found = percentages("latency", "latency", *sizes, *kinds)
    # Seven runs for the round and four for the prefill. Each of the two cases is half of the work.
    assert found == [7, 14, 21, 28, 35, 42, 50, 50, 62, 75, 87]


def test_perplexity_tells_its_progress_after_each_window(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sky is blue, and the grass is green. " * 12)
    sizes = ("--window", "16", "--tokens", "60", "--device", "cpu", "--kv-cache-dtype", "fp8_e4m3")
    found = percentages(
        "perplexity", "perplexity", "--text", str(text), *sizes, "--output", str(tmp_path / "p.json")
    )
    assert found == [12, 25, 37, 50, 62, 75, 87]
