"""`outrider bench prefix`: the cost of a cache that finds nothing, and accept lengths of equal prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from outrider.bench.load.shared_prefix import TALKS, measure_accept_lengths
from outrider.services.cli.commands import app
from outrider.shared.obs.progress import Progress

SIZES = ("--batch", "1,2", "--prompt", "40", "--new-tokens", "8", "--pairs", "2", "--long-prompt", "400")


def test_two_engines_show_what_the_cache_costs_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "prefix.json"
    flags = ("--shape", "tiny", "--device", "cpu", "--rounds", "plain,chain3", "--output", str(path))
    result = CliRunner().invoke(app, ["bench", "prefix", *flags, *SIZES])
    assert result.exit_code == 0, result.output
    first, second, *costs = json.loads(path.read_text())["rows"]
    assert first["case"] == "TTFT of 400 tokens, first time"
    assert len(first["runs_ms"]) == len(second["runs_ms"]) == 5
    assert min(second["runs_ms"]) < min(first["runs_ms"]), "the second prompt should be found in the cache"
    cases = [f"nothing shared, {kind}, batch {batch}" for kind in ("plain", "chain 3") for batch in (1, 2)]
    assert [row["case"] for row in costs] == cases
    for row in costs:
        assert len(row["ratios"]) == 2
        assert row["on_off"] == pytest.approx(sum(row["ratios"]) / 2, abs=1e-3)
        assert row["floor_of"] == "cache off"


def served(reports: list[dict[str, Any]]) -> tuple[tuple[float, float] | None, list[dict[str, Any]]]:
    """Return the accept lengths that a server with these reports has, and the bodies that it received.

    The server uses the first report for a conversation that it has not seen, and the last one otherwise.
    """
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        report = reports[-1] if body in bodies else reports[0]
        bodies.append(body)
        message = {"role": "assistant", "content": "An answer."}
        return httpx.Response(200, json={"choices": [{"message": message}], "speculation": report})

    async def ask() -> tuple[float, float] | None:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://server"
        ) as client:
            return await measure_accept_lengths(client, Progress("prefix"))

    return asyncio.run(ask()), bodies


def test_accept_lengths_of_first_and_second_answers_are_kept_apart() -> None:
    first = {"draft_tokens": 30, "accepted_tokens": 12, "accepted_histogram": [0, 4, 4]}
    second = {"draft_tokens": 30, "accepted_tokens": 8, "accepted_histogram": [2, 4, 2]}
    lengths, bodies = served([first, second])
    assert lengths == (2.5, 2.0)
    assert len(bodies) == 3 * TALKS
    for _, one, again in zip(*(iter(bodies),) * 3, strict=True):
        assert one == again
        assert one["messages"][1] == {"role": "assistant", "content": "An answer."}
    assert len({body["cache_salt"] for body in bodies}) == 1 + TALKS, "a first answer must find nothing"


def test_a_server_without_drafts_has_no_accept_lengths() -> None:
    plain = {"draft_tokens": 0, "accepted_tokens": 0, "accepted_histogram": [5]}
    assert served([plain])[0] is None
