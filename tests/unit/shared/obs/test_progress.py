"""Progress of long work: a bar with the time left on a terminal, lines about every 10 s elsewhere."""

from __future__ import annotations

import io
import queue
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pexpect
import pytest
from rich.console import Console

from outrider.shared.obs import progress as module
from outrider.shared.obs.progress import Progress, Waiting, duration, loading

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WAIT_S = 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(module.time, "monotonic", one.monotonic)
    return one


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


def no_terminal() -> Console:
    return Console(file=io.StringIO())


def test_without_a_terminal_a_line_about_every_10_s_has_percent_and_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("perplexity", 100, console=no_terminal()) as progress:
        for _ in range(100):
            clock.now += 0.4
            progress.advance()
    assert capsys.readouterr().err.splitlines() == [
        "perplexity: 25 %, about 30 s left",
        "perplexity: 50 %, about 20 s left",
        "perplexity: 75 %, about 10 s left",
    ]


def test_short_work_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("work", 10, console=no_terminal()) as progress:
        for _ in range(10):
            clock.now += 0.9
            progress.advance()
    assert capsys.readouterr().err == ""


def test_the_time_left_follows_a_total_that_grows(clock: Clock) -> None:
    progress = Progress("compiling kernels", console=no_terminal())
    assert progress.left_s is None
    clock.now += 8.0
    progress.tell(2, 4)
    assert progress.left_s == 8.0
    progress.tell(2, 10)
    assert progress.left_s == 32.0


def test_on_a_terminal_a_bar_shows_step_count_and_time_left(clock: Clock) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with Progress("recording", 8, still=True, console=console) as progress:
        clock.now += 30.0
        progress.advance(2, "[tree] 5/8/32")
    text = ESCAPE.sub("", shown.getvalue())
    assert "recording: [tree] 5/8/32" in text
    assert "2/8" in text
    assert "90 s left" in text


def test_a_service_that_logs_json_shows_no_bar(clock: Clock) -> None:
    shown = io.StringIO()
    lines: list[tuple[str, int, float]] = []
    console = Console(file=shown, force_terminal=True)
    with Progress(
        "recording", 4, bar=False, console=console, report=lambda *line: lines.append(line)
    ) as progress:
        clock.now += 10.0
        progress.advance()
    assert shown.getvalue() == ""
    assert lines == [("recording", 25, 30.0)]


@pytest.mark.parametrize(
    ("step_s", "lines"),
    [
        (0.5, [("loaded", {"seconds": 2.0})]),
        (
            5.0,
            [("loading", {"percent": 50, "left_s": 10}), ("loaded", {"seconds": 20.0})],
        ),
    ],
)
def test_a_model_is_logged_when_it_is_loaded_and_a_slow_one_also_meanwhile(
    step_s: float, lines: list[tuple[str, dict[str, Any]]], clock: Clock
) -> None:
    log: Any = Log()
    with loading(Path("/m"), log, to_console=False) as tell:
        for loaded in (1, 2, 3, 4):
            clock.now += step_s
            tell(loaded, 4)
        tell(4, 4)
    assert log.lines == [(text, {"model": "/m", **fields}) for text, fields in lines]


def test_a_model_that_fails_to_load_is_not_logged_as_loaded() -> None:
    log: Any = Log()

    def load() -> None:
        with loading(Path("/m"), log, to_console=False) as tell:
            tell(4, 4)
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        load()
    assert log.lines == []


PROGRAM = """
from outrider.shared.obs.progress import Progress
with Progress("work", 4) as progress:
    progress.advance(step="first")
    print("in between")
    input()
print("end of", "work")
"""


def test_in_a_real_terminal_the_bar_appears_and_leaves_and_prints_stay() -> None:
    child = pexpect.spawn(
        sys.executable, ["-c", PROGRAM], encoding="utf-8", timeout=WAIT_S, dimensions=(20, 100)
    )
    child.expect("in between")
    child.expect("work: first")
    child.expect("1/4")
    child.expect("left")
    child.send("\r")
    child.expect("end of work")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (40, "40 s"), (170, "3 min"), (4800, "80 min"), (7260, "2 h 1 min")]
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_work_of_unknown_length_tells_its_time_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_S", 0.0)
    lines: queue.Queue[str] = queue.Queue()
    with Waiting("starting services", console=no_terminal(), print_text=lines.put) as waiting:
        assert lines.get(timeout=WAIT_S) == "starting services (0 s so far)"
        waiting.tell(0, step="target ready")
        while "target ready" not in (line := lines.get(timeout=WAIT_S)):
            pass
        assert line == "starting services: target ready (0 s so far)"
    assert not [one for one in threading.enumerate() if one.name == "progress"]


def test_short_work_of_unknown_length_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting("importing", console=no_terminal()):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_work_of_unknown_length_with_its_time_and_keeps_the_streams() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    before = sys.stderr
    with Waiting("importing", console=console, redirect=False):
        assert sys.stderr is before
    assert re.search(r"importing .* 0:00:00", ESCAPE.sub("", shown.getvalue()))
