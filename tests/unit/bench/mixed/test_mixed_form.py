"""The parts `form` and `rules` of `outrider bench mixed`, against small fake servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.services.fake_openai import FakeServer
from typer.testing import CliRunner

from outrider.bench.mixed.cases import RULES, SCHEMA
from outrider.services.cli.commands import app

TINY = ("--pairs", "1", "--batch", "2", "--prompt-tokens", "3", "--new-tokens", "4")
LIMITS = {
    "vocab_size": 50,
    "max_running_requests": 8,
    "max_model_len": 2000,
    "internal_states": [{"draft_state": "on"}],
}


def run(fake: FakeServer, folder: Path, *flags: str) -> dict[str, Any]:
    output = folder / "mixed.json"
    try:
        flags = ("--url", fake.url, *TINY, *flags, "--output", str(output))
        result = CliRunner().invoke(app, ["bench", "mixed", *flags], catch_exceptions=False)
    finally:
        fake.close()
    assert result.exit_code == 0, result.output
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def test_answers_with_a_schema_are_compared_with_free_answers(tmp_path: Path) -> None:
    gateway = FakeServer("outrider")
    gateway.limits = dict(LIMITS)
    written = run(gateway, tmp_path, "--only", "form")
    rows = {row["name"]: row for row in written["rows"]}
    assert list(rows) == [
        "plain at batch 1",
        "chain 3 at batch 1",
        "tree at batch 1",
        "plain beside one with a schema",
    ], "the server runs eight requests at once"
    assert rows["plain at batch 1"]["goal"] == 0.909
    assert rows["plain beside one with a schema"]["goal"] == 0.93
    formed = [body["sampling_params"].get("json_schema") == SCHEMA for body in gateway.bodies]
    assert any(formed)
    assert not all(formed)
    beside = [body for body in gateway.bodies if body["stream"]]
    assert {"json_schema" in body["sampling_params"] for body in beside} == {True, False}


def test_other_servers_get_the_schema_as_a_response_format(tmp_path: Path) -> None:
    peer = FakeServer()
    written = run(peer, tmp_path, "--api", "openai", "--only", "form:plain at*")
    assert [row["name"] for row in written["rows"]] == ["plain at batch 1", "plain at batch 16"]
    formats = [body["response_format"] for body in peer.bodies if "response_format" in body]
    assert formats[0]["json_schema"]["schema"] == SCHEMA
    assert len(formats) < len(peer.bodies)


def test_answers_with_penalties_are_compared_with_greedy_answers(tmp_path: Path) -> None:
    gateway = FakeServer("outrider")
    gateway.limits = {**LIMITS, "max_running_requests": 16}
    rows = {row["name"]: row for row in run(gateway, tmp_path, "--only", "rules")["rows"]}
    names = ("plain", "chain 3", "tree")
    assert set(rows) == {f"{name} at batch {batch}" for name in names for batch in (1, 16)}
    assert rows["tree at batch 16"]["goal"] == 0.926
    ruled = [body for body in gateway.bodies if "presence_penalty" in body["sampling_params"]]
    assert len(ruled) == len(gateway.bodies) / 2
    assert all(RULES.items() <= body["sampling_params"].items() for body in ruled)
    assert all(body["top_logprobs_num"] == 5 for body in ruled)
    assert not any("return_logprob" in body for body in gateway.bodies if body not in ruled)


def test_other_servers_get_the_number_of_log_probabilities(tmp_path: Path) -> None:
    peer = FakeServer()
    run(peer, tmp_path, "--api", "openai", "--only", "rules:plain at batch 1")
    ruled = [body for body in peer.bodies if "presence_penalty" in body]
    assert [body["logprobs"] for body in ruled] == [5] * len(ruled)
    assert len(ruled) == len(peer.bodies) / 2
