"""`outrider bench auto` on a CPU in a small size, and the acceptance law that it sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench.measure.auto import LAW_DEPTH, law_of, parse_accept_lengths
from outrider.services.cli.commands import app
from outrider.shared.base.errors import ConfigurationError

TINY = ("--shape", "tiny", "--device", "cpu", "--prompt", "8", "--new-tokens", "24", "--pairs", "1")


@pytest.mark.parametrize("accept_length", [1.0, 1.2, 2.5, 4.0, 6.0])
def test_chains_have_the_given_accept_length(accept_length: float) -> None:
    rates = law_of(accept_length)
    assert len(set(rates)) == 1
    reach, tokens = 1.0, 1.0
    for rate in rates[:LAW_DEPTH]:
        reach *= rate
        tokens += reach
    assert tokens == pytest.approx(accept_length, abs=1e-4)


def test_auto_is_compared_with_the_best_choice(tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    flags = ("--rounds", "plain,chain3,3/2/6", "--accept-length", "1,2.5", "--batch", "2")
    result = CliRunner().invoke(app, ["bench", "auto", *TINY, *flags, "--output", str(path)])
    assert result.exit_code == 0, result.output
    useless, good = json.loads(path.read_text())["rows"]
    assert useless["case"] == "auto ÷ best, accept length 1, batch 2, 24 tokens"
    for row, goal in ((useless, 0.985), (good, 0.97)):
        assert row["goal"] == goal
        assert set(row["fixed_tok_s"]) == {"plain", "chain 3", "tree 3/2/6"}
        assert row["best_tok_s"] == max(row["fixed_tok_s"].values()) == row["fixed_tok_s"][row["best"]]
        assert row["value"] > 0
        assert row["decision"]["reason"] != "idle"


@pytest.mark.parametrize("text", ["0.5", "7", "two", ""])
def test_wrong_accept_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--accept-length"):
        parse_accept_lengths(text)
