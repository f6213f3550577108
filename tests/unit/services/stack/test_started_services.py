"""Services that a command starts: what a terminal shows meanwhile, and their output after a failure."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console
from structlog.typing import FilteringBoundLogger

from outrider.services.stack import started_services as module
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.obs import progress
from outrider.shared.obs.logging import configure_logging, get_logger
from outrider.shared.obs.progress import log_lines

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def logged(tell: Callable[[FilteringBoundLogger], None]) -> str:
    """Return a line as a service logs it."""
    stream = io.StringIO()
    configure_logging("target", "info", stream=stream)
    tell(get_logger("outrider.target"))
    return stream.getvalue().strip()


def started(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Let the services print these lines while they start."""

    @contextmanager
    def stack(_options: StackOptions, echo: Any, tell: Any) -> Iterator[str]:
        for line in lines:
            echo("target", line)
        tell("the draft runs in the target's process on the CPU: a long explanation")
        tell("target ready after 2.0 s")
        yield "the stack"

    monkeypatch.setattr(module, "running_stack", stack)


def test_a_terminal_shows_how_far_a_service_is_until_all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    steps: list[str] = []
    monkeypatch.setattr(progress.Progress, "tell", lambda self, done, total=None, step="": steps.append(step))
    line = logged(lambda log: log_lines(log, model="/m")("compiling kernels", 40, 30.0))
    started(monkeypatch, ["2026-11-23T09:00:00.000Z [info] listening [outrider.target] port=1", line])
    with started_services(StackOptions()) as stack:
        assert stack == "the stack"
        assert "starting services" in ESCAPE.sub("", shown.getvalue())
    assert steps == ["target, compiling kernels: 40 %, 30 s left", "target ready after 2.0 s"]


def test_a_benchmark_that_fails_prints_the_last_lines_of_the_services(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started(monkeypatch, ["one", "two", "three"])
    with pytest.raises(ValueError, match="broken"), started_services(StackOptions(), kept_lines=2):
        raise ValueError("broken")
    assert capsys.readouterr().err == "target | two\ntarget | three\n"
