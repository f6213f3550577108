"""Progress of benchmarks without a terminal: lines with the percentage and the time left."""

from __future__ import annotations

import ast
import asyncio
import re
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from outrider.bench.load import shared_prefix
from outrider.bench.load.lone import TimedReply
from outrider.bench.load.shared_prefix import Chats, PrefixOptions
from outrider.bench.stacks.random_target import random_target
from outrider.bench.stacks.shapes import named_shape
from outrider.services.cli.commands import app
from outrider.services.stack.options import StackOptions
from outrider.shared.obs import progress


@pytest.fixture(autouse=True)
def every_step_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)


def test_work_of_unknown_length_is_shown_by_waiting() -> None:
    """A `Progress` that gets no updates shows no time left, and prints nothing without a terminal."""
    root = Path(__file__).resolve().parents[4]
    files = [
        file for room in ("bench", "services", "shared", "train") for file in (root / room).rglob("*.py")
    ]
    assert len(files) > 100
    untold = [
        f"{file.relative_to(root)}:{item.context_expr.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and getattr(item.context_expr.func, "id", "") == "Progress"
        and item.optional_vars is None
    ]
    assert untold == []


def test_random_weights_tell_their_progress(capsys: pytest.CaptureFixture[str]) -> None:
    random_target(named_shape("tiny"), torch.device("cpu"), torch.float32)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 10
    assert all(re.fullmatch(r"making random weights: \d+ %, about \d+ s left", line) for line in lines)


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


def test_roofline_tells_its_progress_after_each_part(tmp_path: Path) -> None:
    found = percentages("roofline", "roofline", "--device", "cpu", "--small", "--output", str(tmp_path))
    assert found == [33, 66]


def test_prefix_cost_tells_its_progress_after_each_case(tmp_path: Path) -> None:
    sizes = (
        "--batch",
        "1,2,3",
        "--prompt",
        "40",
        "--new-tokens",
        "4",
        "--pairs",
        "1",
        "--long-prompt",
        "160",
    )
    shape = ("--shape", "tiny", "--device", "cpu", "--rounds", "plain")
    assert percentages("prefix", "prefix", *shape, *sizes, "--output", str(tmp_path)) == [25, 50, 75]


def test_prefix_tells_its_progress_after_each_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions":
            return httpx.Response(400)  # a server without a chat template
        return httpx.Response(200, json={"output_ids": [7], "meta_info": {"cached_tokens": 0}})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(shared_prefix.httpx, "AsyncClient", client)
    monkeypatch.setattr(shared_prefix.LoneConnection, "post", lambda *_arguments: TimedReply(0.001, 200, b""))
    chats = Chats(count=2, turns=1, system=4, turn=1, answer=1, vocab=100)
    options = PrefixOptions(StackOptions(), None, None, chats, 8, 1, None)
    asyncio.run(shared_prefix._measure(options, "http://server"))
    # Two chats without and two with speculation, ten long prompts, and 36 answers for accept lengths.
    found = re.findall(r"^prefix: (\d+) %, about \d+ s left$", capsys.readouterr().err, re.M)
    assert [int(one) for one in found] == [100 * done // 50 for done in range(1, 15)]
