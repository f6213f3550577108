"""`outrider bench serve` against a running gateway: REST and gRPC, the counts, and failing requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_target import FakeTarget, Script
from gateway_thread import Stack
from typer.testing import CliRunner

from outrider.services.cli.commands import app
from outrider.shared.base.errors import OutriderError, UnavailableError

RUNNER = CliRunner()
LOAD = ("--duration", "0.4", "--request-rate", "20", "--max-tokens", "6", "--prompt-tokens", "12")


def bench_serve(endpoint: tuple[str, str], output: Path, *flags: str) -> tuple[int, dict]:
    result = RUNNER.invoke(app, ["bench", "serve", *endpoint, *LOAD, *flags, "--output", str(output)])
    if isinstance(result.exception, OutriderError):
        raise result.exception
    return result.exit_code, json.loads(output.read_text())


@pytest.mark.parametrize("api", ["rest", "grpc"])
def test_every_request_is_answered_and_measured(
    stack: Stack, fake: FakeTarget, tmp_path: Path, api: str
) -> None:
    endpoint = ("--url", stack.base_url) if api == "rest" else ("--grpc", stack.grpc_address)
    code, written = bench_serve(endpoint, tmp_path / "load.json", "--speculation", "off")
    assert code == 0
    assert written["settings"]["api"] == api
    assert written["failed"] == 0
    rows = {row["case"]: row for row in written["rows"]}
    assert rows["tokens"]["value"] == pytest.approx(6 * rows["requests"]["value"]), (
        "the server counts six tokens per answer"
    )
    assert rows["requests"]["floor"] == pytest.approx(written["requests"] / 0.4), "the offered load"
    assert rows["tokens"]["floor"] == pytest.approx(6 * rows["requests"]["floor"])
    for case in (
        "time to first token, p50",
        "per token after the first (TPOT), p99",
        "whole request (e2e), p90",
    ):
        assert rows[case]["value"] > 0
        assert rows[case]["floor"] > 0
        assert rows[case]["ratio"] > 0
    assert rows["time to first token, p50"]["value"] <= rows["whole request (e2e), p50"]["value"]
    assert written["requests"] + 6 == len(fake.seen), "six requests alone, then the load"
    assert {seen.max_new_tokens for seen in fake.seen} == {6}
    assert all(len(seen.prompt_ids) == 12 for seen in fake.seen)


def test_what_warms_up_is_not_counted(stack: Stack, fake: FakeTarget, tmp_path: Path) -> None:
    _code, cold = bench_serve(("--url", stack.base_url), tmp_path / "cold.json")
    sent = len(fake.seen)
    _code, warm = bench_serve(("--url", stack.base_url), tmp_path / "warm.json", "--warm-up", "0.5")
    assert warm["requests"] == cold["requests"]
    assert len(fake.seen) - sent > sent


def test_failures_are_counted_and_told(stack: Stack, fake: FakeTarget, tmp_path: Path) -> None:
    served: list[int] = []

    def every_second_fails(request: object) -> Script:
        served.append(1)
        return Script([[7], [8]], error=UnavailableError("no more") if len(served) % 2 else None)

    fake.script = every_second_fails
    code, written = bench_serve(("--url", stack.base_url), tmp_path / "load.json")
    assert code == 0
    assert 0 < written["failed"] < written["requests"]
    assert any("no more" in error for error in written["errors"])
    rows = {row["case"]: row["value"] for row in written["rows"]}
    assert rows["requests within the limits (goodput)"] == pytest.approx(rows["requests"])


def test_goodput_counts_what_meets_the_limits(stack: Stack, tmp_path: Path) -> None:
    _code, written = bench_serve(
        ("--url", stack.base_url), tmp_path / "load.json", "--first-token-limit", "0.000001"
    )
    rows = {row["case"]: row["value"] for row in written["rows"]}
    assert rows["requests"] > 0
    assert rows["requests within the limits (goodput)"] == 0


def test_nobody_at_the_address_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        bench_serve(("--url", "http://127.0.0.1:9"), tmp_path / "load.json")
