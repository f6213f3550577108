"""The goals of `outrider bench mixed`: for which sizes a part has goals, and what they limit."""

from __future__ import annotations

import json
from contextlib import closing
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.services.fake_openai import FakeServer
from typer.testing import CliRunner

from outrider.bench.mixed import command, pauses, plan
from outrider.bench.mixed.cases import PLAIN, RunningStreams, Section
from outrider.bench.mixed.client import RequestFormat
from outrider.bench.mixed.figures import MixedFigure, figure_table
from outrider.services.cli.commands import app


def test_goals_are_limits_from_either_side() -> None:
    assert MixedFigure(Section.ODD, "a", 100.0, "tok/s", 0.96, 0.95).met is True
    assert MixedFigure(Section.ODD, "a", 100.0, "tok/s", 0.94, 0.95).met is False
    assert MixedFigure(Section.SOAK, "a", 1.0, "requests", goal=0, at_least=False).met is False
    assert MixedFigure(Section.TTFT, "a", 1.0, "ms").met is None


def test_gap_and_soak_have_goals_for_their_default_sizes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(command, "run_mixed", lambda options: given.append(options) or 0)
    output = ("--output", str(tmp_path / "goals.json"))
    large = SimpleNamespace(max_model_len=131_072, max_running=64, draft_state="on", shape_limits={})

    def goals(*flags: str) -> dict[str, list[float | None]]:
        result = CliRunner().invoke(app, ["bench", "mixed", "--url", "http://server", *flags, *output])
        assert result.exit_code == 0, result.output
        server: Any = large
        sizes = plan.sizes_for(given[-1].wishes, server, given[-1].only)
        cases, _ = plan.plan_cases(given[-1].only, sizes, server, RequestFormat.OUTRIDER, ())
        found: dict[str, list[float | None]] = {}
        for case in cases:
            keywords = case.measure.keywords  # type: ignore[attr-defined]
            if case.section is Section.GAP:
                streams = keywords["streams"]
                found[f"gap {case.name}"] = [streams.pause_goal_ms, streams.ttft_goal]
            elif case.section is Section.SOAK:
                found[f"soak {case.name}"] = [keywords["mix"].tok_s_goal, keywords["mix"].p99_goal_s]
            elif case.section is Section.TTFT:
                found[f"ttft {keywords['length']}"] = [keywords["goal_ms"]]
        return found

    defaults = goals()
    assert defaults["gap plain"] == [35, 1.5]
    assert defaults["gap tree"] == [None, 1.5]
    assert defaults["soak plain"] == [None, None]
    assert defaults["soak off and auto"] == [4000, 12]
    assert defaults["soak every shape"] == [2500, 18]
    assert None not in [goal for name, (goal, *_) in defaults.items() if name.startswith("ttft")]
    assert goals("--pairs", "1", "--seconds", "9") == defaults, "these are not sizes"
    shorter = goals("--longest", "8000", "--ttft", "256,400")
    assert {name: goal for name, goal in shorter.items() if goal != [None] * len(goal)} == {"ttft 256": [10]}
    assert goals("--clients", "5")["soak every shape"] == [None, None]


def test_the_table_says_for_which_machine_the_goals_are() -> None:
    def printed(*figures: MixedFigure) -> str:
        console = Console(width=200, file=StringIO())
        console.print(figure_table("mixed", figures))
        return console.file.getvalue()  # type: ignore[attr-defined]

    speed = MixedFigure(Section.SOAK, "tokens", 3600.0, "tok/s", goal=4000)
    pause = MixedFigure(Section.GAP, "pause", 30.0, "ms", 7.5, 35, at_least=False, limits_value=True)
    odd = MixedFigure(Section.ODD, "a", 100.0, "tok/s", 0.96, 0.95)
    text = printed(speed, pause, odd)
    assert "H200" in text
    assert [words in text for words in ("≥ 4000 tok/s", "≤ 35 ms", "≥ 0.95 ")] == [True] * 3
    assert "H200" not in printed(MixedFigure(Section.TTFT, "a", 1.0, "ms"))


async def test_the_begin_of_a_longest_pause_is_the_time_since_the_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = iter(
        [
            ([[0.7, 0.8, 1.0, 1.5, 1.6, 2.1], [0.9, 1.0, 1.7, 2.1]], 0.95, 2.0),
            ([[0.6, 0.7, 1.3, 1.4]], 1.0, 1.35),
        ]
    )

    class Alone:
        def body(self, length: int, new: int, kind: Any) -> bytes:
            return b""

        async def send(self, body: bytes) -> Any:
            return SimpleNamespace(seconds=0.5)

    async def one_run(*_: Any) -> Any:
        return next(runs)

    monkeypatch.setattr(pauses, "_streams_beside_prompt", one_run)
    client: Any = Alone()
    sizes: Any = SimpleNamespace(longest=40, pairs=2)
    streams = RunningStreams("plain", PLAIN, pause_goal_ms=600, ttft_goal=1.5)
    pause, ttft = [figure.as_row().more for figure in await pauses.measure_gap(client, streams, sizes)]
    assert pause["runs_ms"] == [700.0, 600.0]
    assert pause["runs_at_ms"] == [50.0, -300.0], "the second pause began before the prompt was sent"
    assert (pause["goal"], pause["goal_is"], pause["goal_of"], pause["met"]) == (
        600,
        "at most",
        "value",
        False,
    )
    assert (ttft["goal"], ttft["goal_is"], ttft["goal_of"], ttft["met"]) == (1.5, "at most", "ratio", True)


def test_the_figures_of_ttft_and_soak_are_compared_with_their_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_have_goals", lambda *_: True)
    sizes = ("--prompt-tokens", "3", "--new-tokens", "4", "--longest", "40", "--ttft", "16")
    load = ("--seconds", "0.2", "--clients", "2", "--only", "ttft,soak:every shape")
    output = tmp_path / "mixed.json"
    with closing(FakeServer("outrider")) as server:
        server.limits = {"max_model_len": 2000, "internal_states": [{"draft_state": "on"}]}
        flags = ["bench", "mixed", "--url", server.url, *sizes, *load, "--output", str(output)]
        result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    rows = {row["case"]: row for row in json.loads(output.read_text())["rows"]}
    limits = {case: (row["goal"], row["goal_is"], row["goal_of"]) for case, row in rows.items()}
    assert limits["ttft: prompt of 16"] == (8, "at most", "value")
    assert limits["soak: every shape: tokens"] == (2500, "at least", "value")
    assert limits["soak: every shape: latency, p99"] == (18, "at most", "value")
    assert limits["soak: every shape: latency, p50"] == (None, None, None)
    assert rows["soak: every shape: latency, p99"]["met"] is True
