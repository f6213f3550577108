"""What is shown while services start: their progress on a terminal, lines with the time so far elsewhere."""

from __future__ import annotations

import io
import queue
import re
import sys
import threading
from collections.abc import Callable

import pexpect
import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.cli import up
from outrider.services.stack import launch
from outrider.services.stack.start_bar import StartBar
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.obs import progress

WAIT_S = 60
LOADING = "2026-11-23T09:00:00.000Z [info] loading [outrider.target] left_s=30 model=/m percent=40"


def test_without_a_terminal_lines_say_what_the_services_do_and_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    lines: queue.Queue[str] = queue.Queue()
    with StartBar(Console(file=io.StringIO()), lines.put) as bar:
        assert lines.get(timeout=WAIT_S) == "starting services (0 s so far)"
        bar.hear("target", LOADING)
        while (line := lines.get(timeout=WAIT_S)) == "starting services (0 s so far)":
            pass
    assert line == "starting services: target, loading: 40 %, 30 s left (0 s so far)"


@pytest.mark.parametrize("more", [(), ("--log-json",)])
def test_up_tells_the_time_while_its_services_start(
    monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)

    printed = threading.Event()
    printer_of = up._progress_to

    def noted(console: Console, log_json: bool) -> Callable[[str], None]:
        printer = printer_of(console, log_json)

        def note(line: str) -> None:
            printer(line)
            printed.set()

        return note

    def start(*_: object) -> None:
        assert printed.wait(WAIT_S)
        raise ConfigurationError("the services are not started")

    monkeypatch.setattr(up, "_progress_to", noted)
    monkeypatch.setattr(launch, "running_stack", start)
    result = CliRunner().invoke(cli.app, ["up", *more])
    text = (
        r'\{"service": "up", "event": "starting services \(0 s so far\)"\}'
        if more
        else r"^starting services \("
    )
    assert re.search(text, result.output, re.MULTILINE), result.output


def test_a_terminal_shows_that_modules_are_imported() -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "outrider.services.cli", "doctor", "--draft", "none", "--device", "cpu"],
        encoding="utf-8",
        timeout=WAIT_S,
        dimensions=(40, 120),
    )
    child.expect("importing")
    child.expect("This pair can be served")
    child.expect(pexpect.EOF)
