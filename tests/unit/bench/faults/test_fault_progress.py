"""Progress of the benchmarks that disturb services: lines with the percentage and the time left."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.faults import move, overload, soak, stall
from outrider.bench.faults.stall import Arrivals, Body
from outrider.bench.load.open_loop import Experience
from outrider.bench.load.server import Server
from outrider.services.stack.options import StackOptions
from outrider.shared.obs import progress


@pytest.fixture(autouse=True)
def every_step_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)


class NoAnswers:
    """Stands for an `Asker` whose server is not needed."""

    url = "http://server"

    async def whole(self, *_: object) -> dict[int, Any]:
        return {}

    async def close(self) -> None:
        pass


def percentages(title: str, text: str) -> list[int]:
    return [int(one) for one in re.findall(rf"^{re.escape(title)}: (\d+) %, about \d+ s left$", text, re.M)]


def test_soak_tells_its_progress_in_each_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing_left(_asker: object) -> dict[str, float]:
        return {}

    monkeypatch.setattr(soak, "Asker", lambda _url: NoAnswers())
    monkeypatch.setattr(soak, "find_server", lambda url, _key: Server(url, "toy", "outrider"))
    monkeypatch.setattr(soak, "usages", lambda _supervisor: {})
    monkeypatch.setattr(soak, "settle", nothing_left)
    monkeypatch.setattr(soak, "soak_questions", lambda *_: [None] * 4)
    options = soak.SoakOptions(StackOptions(device="cpu"), 0.002, 0, 0.0, 1, tmp_path / "soak.json")
    stack: Any = SimpleNamespace(url="http://server", supervisor=SimpleNamespace(children=[]))
    assert asyncio.run(soak._Soak(options, stack).run()) == 0
    told = capsys.readouterr().err
    assert percentages("recording the right answers", told) == [25, 50, 75]
    # The warm-up takes a tenth of the time. Five equal phases follow. A phase tells when it begins.
    assert percentages("soak", told) == [10, 28, 46, 64, 82]


def test_overload_tells_its_progress_with_each_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(*_arguments: Any) -> None:
        pass

    async def answered(*arguments: Any) -> list[Experience]:
        arguments[-1](1)  # on_answer
        now = time.perf_counter()
        return [Experience(now, [now], now + 1.0, 2)]

    monkeypatch.setattr(overload, "find_server", lambda url, _key: Server(url, "toy", "outrider"))
    monkeypatch.setattr(overload, "usages", lambda _supervisor: {})
    monkeypatch.setattr(overload, "run_clients", answered)
    monkeypatch.setattr(overload, "run_load", answered)
    monkeypatch.setattr(overload, "_report", lambda *_: 0)
    monkeypatch.setattr(overload, "_limit_flood", nothing)
    monkeypatch.setattr(overload, "rates_beside_limited_key", nothing)
    options = overload.OverloadOptions(
        StackOptions(), 60, 3000.0, [2], 1.0, 0, 0.1, tmp_path / "overload.json"
    )
    stack: Any = SimpleNamespace(url="http://server", supervisor=None)
    assert asyncio.run(overload._measure(options, stack, options.stack)) == 0
    told = capsys.readouterr().err
    # The answers come at the beginning of the measurements. The last two loads run at the same time.
    assert percentages("measuring the capacity", told) == [33, 66]
    assert percentages("load", told) == [20, 40, 60, 60, 80]


def test_move_tells_its_progress_after_each_stream_and_each_part_of_a_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(_asker: object, _question: object, _mode: str, found: Any) -> Any:
        found.arrivals += [0.0] * move.BEGUN_EVENTS
        found.tokens = (1, 2)
        return found

    killed: list[int] = []
    monkeypatch.setattr(move, "_stream", stream)
    monkeypatch.setattr(move, "Asker", lambda _url: NoAnswers())
    monkeypatch.setattr(move.os, "kill", lambda process, _signal: killed.append(process))
    two: Any = SimpleNamespace(
        url="http://server",
        metric=lambda _name: 2.0 * len(killed),
        process_id=lambda index: 100 + index,
        start_again=lambda _index: None,
    )
    options = move.MoveOptions(Path("target"), None, ("cpu", "cpu"), 4, 2, 8, 16, (), 0, Path("move.json"))
    rounds = asyncio.run(move._measure(options, two))
    assert killed == [100, 101]
    assert [one.moved for one in rounds] == [2, 2]
    told = capsys.readouterr().err
    assert percentages("recording the right tokens", told) == [25, 50, 75]
    assert percentages("move", told) == [16, 33, 50, 66, 83]


def test_stall_tells_its_progress_before_each_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def streams(_url: str, _count: int) -> Iterator[Arrivals]:
        yield Arrivals()

    def window(_arrivals: Arrivals, action: Any) -> list[float]:
        action()
        return [0.01]

    monkeypatch.setattr(stall, "_streams", streams)
    monkeypatch.setattr(stall, "_window", window)
    monkeypatch.setattr(stall, "_post", lambda _url, _body: 400)
    monkeypatch.setattr(stall, "cpu_seconds", lambda _process: 0.0)
    monkeypatch.setattr(stall, "expensive_bodies", lambda: {name: Body("/generate", b"") for name in "abcd"})
    options = stall.StallOptions(StackOptions(device="cpu"), 1, 2, 0.0, tmp_path / "stall.json")
    assert stall._measure(options, "http://server", "server", 1) == 0
    assert percentages("stall", capsys.readouterr().err) == [25, 50, 75]
