"""`outrider bench mixed` against a running stack, in Outrider's own format and as any OpenAI server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.services.stack import Stack
from typer.testing import CliRunner

from outrider.services.cli.commands import app

SIZES = (
    *("--pairs", "1", "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "4"),
    *("--auto-batch", "2", "--auto-tokens", "4", "--longest", "64", "--ttft", "4"),
    *("--seconds", "0.5", "--clients", "3"),
)
CASES = {
    "outrider": (
        "odd:chain 3 beside one tree,odd:plain beside one traced tree,auto,gap:tree,ttft,soak:every shape"
    ),
    "openai": "odd:greedy beside one with filters,gap,ttft,soak",
}


@pytest.mark.parametrize("api", ["outrider", "openai"])
def test_a_running_stack_is_loaded_with_requests_that_differ(stack: Stack, tmp_path: Path, api: str) -> None:
    output = tmp_path / "mixed.json"
    command = ("bench", "mixed", "--url", stack.base_url, "--api", api, "--only", CASES[api], *SIZES)
    result = CliRunner().invoke(app, [*command, "--output", str(output)])
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    assert written["failed"] == {}
    assert not any(name.startswith("odd") for name in written["skipped"])
    assert written["settings"]["server"]["owner"] == "outrider"
    rows = {row["case"]: row for row in written["rows"]}
    for row in rows.values():
        assert {"name", "ratio", "goal"} <= set(row)
    odd = [row for row in rows.values() if row["section"] == "odd"]
    assert len(odd) == CASES[api].count("odd:")
    assert all(row["ratio"] > 0 and row["value"] > 0 for row in odd)
    mix = "every shape" if api == "outrider" else "plain"
    assert rows[f"soak: {mix}: failed"]["errors"] == {}
    assert rows[f"soak: {mix}: left over"]["left_over"] == {}
    assert rows[f"soak: {mix}: tokens"]["completed"] > 0
    stack.assert_no_page_held()
