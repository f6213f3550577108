"""Shows the progress of long work: a bar on a terminal, otherwise a line every 10 s.

`Progress` estimates the time left. `Waiting` shows the time so far of work whose length is unknown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LINE_S = 10.0
"""Shortest time in seconds between two lines about the progress, without a terminal."""
SHORTEST_WAIT_S = 0.05
REDRAWS_PER_S = 2.0

Report = Callable[[str, int, float], None]
"""Takes the title of the work, the finished percentage and the estimated seconds left."""


class Progress:
    """Shows how far some work is and how long the rest will take. Use it as a context manager.

    On a terminal, this is a bar on standard error, which disappears at the end. Without a terminal, a line is
    reported about every `LINE_S` seconds. Work that takes less time prints nothing.

    The estimate of the time left assumes that the rest runs at the mean speed so far.

    Args:
        title: Name of the work, such as ``compiling kernels``.
        total: Amount of work, in any unit. None if only `tell` knows it.
        counts: True to show the finished and the total number of items beside the bar.
        bar: False for lines even on a terminal.
        still: True to redraw the bar only at calls of `tell`, so that no thread disturbs a measurement.
        report: Function that receives the lines. By default, they are printed to standard error.
        console: Console of the bar; by default, standard error.
        redirect: False to leave standard output and standard error as they are while the bar is shown. What
            the work prints then disturbs the bar.
    """

    def __init__(
        self,
        title: str,
        total: float | None = None,
        *,
        counts: bool = True,
        bar: bool = True,
        still: bool = False,
        report: Report | None = None,
        console: Console | None = None,
        redirect: bool = True,
    ) -> None:
        self._title = title
        self._total = total
        self._done = 0.0
        self._report = report or print_line
        self._started = self._told = time.monotonic()
        self._still = still
        self._bar: Bar | None = None
        console = console or Console(stderr=True)
        if bar and console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                _TimeLeft(),
                console=console,
                transient=True,
                auto_refresh=not still,
                refresh_per_second=REDRAWS_PER_S,
                # If standard output is no terminal, what the work prints there must not go to the bar's.
                redirect_stdout=redirect and sys.stdout.isatty(),
                redirect_stderr=redirect,
            )
            self._task = self._bar.add_task(title, total=total, count="", ends=None)
        self._counts = counts

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until all work is done. None before the first part of the work is done."""
        if self._total is None or self._done <= 0:
            return None
        spent = time.monotonic() - self._started
        return max(0.0, spent * (self._total - self._done) / self._done)

    def tell(self, done: float, total: float | None = None, step: str = "") -> None:
        """Show that a part of the work is done.

        Args:
            done: Finished amount of work.
            total: Amount of all work, if it differs from the last known amount.
            step: What is being done now. The text is shown after the title.
        """
        self._done = done
        self._total = self._total if total is None else total
        now, left_s = time.monotonic(), self.left_s
        if self._bar is not None:
            shown = self._counts and self._total is not None
            self._bar.update(
                self._task,
                completed=done,
                total=self._total,
                description=f"{self._title}: {step}" if step else self._title,
                count=f"{done:g}/{self._total:g}" if shown else "",
                ends=None if left_s is None else now + left_s,
                refresh=self._still,
            )
        elif left_s is not None and self._total is not None and now - self._told >= LINE_S:
            self._told = now
            if done < self._total:
                self._report(self._title, int(100 * done / self._total), left_s)

    def advance(self, amount: float = 1, step: str = "") -> None:
        """Show that a further amount of work is done."""
        self.tell(self._done + amount, step=step)


class Waiting(Progress):
    """Shows how long some work has lasted, if nobody knows how long it will take.

    On a terminal, this is a bar with the time so far, which disappears at the end. Without a terminal, a line
    is printed every `LINE_S` seconds. Work that takes less time prints nothing.

    Args:
        title: Name of the work, such as ``starting services``.
        console: Console of the bar; by default, standard error.
        print_text: Function that receives the lines. By default, they are printed to standard error.
        redirect: As for `Progress`. Use False around imports, because imported modules keep standard error.
    """

    def __init__(
        self,
        title: str,
        *,
        console: Console | None = None,
        print_text: Callable[[str], None] | None = None,
        redirect: bool = True,
    ) -> None:
        super().__init__(title, counts=False, console=console, redirect=redirect)
        self._print_text = print_text or _print_text
        self._step = ""
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._tell_time, name="progress", daemon=True)

    def __enter__(self) -> Waiting:
        super().__enter__()
        if self._bar is None:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is None:
            self._lines.join()
        super().__exit__(kind, error, trace)

    def tell(self, done: float, total: float | None = None, step: str = "") -> None:
        """Show what is being done now."""
        self._step = step
        super().tell(done, total, step)

    def _tell_time(self) -> None:
        while not self._ended.wait(max(LINE_S, SHORTEST_WAIT_S)):
            what = f"{self._title}: {self._step}" if self._step else self._title
            self._print_text(f"{what} ({duration(time.monotonic() - self._started)} so far)")


def importing() -> Waiting:
    """Return what to show while heavy modules are imported."""
    return Waiting("importing", redirect=False)


class _TimeLeft(ProgressColumn):
    """The estimated time left of a task. It counts down between two estimates."""

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        return Text("" if ends is None else f"{duration(max(0.0, ends - time.monotonic()))} left", "cyan")


def print_line(title: str, percent: int, left_s: float) -> None:
    """Print a line about the progress to standard error."""
    _print_text(f"{title}: {percent} %, about {duration(left_s)} left")


def _print_text(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def log_lines(log: FilteringBoundLogger, **fields: object) -> Report:
    """Return a function that logs lines about the progress, with further fields."""

    def report(title: str, percent: int, left_s: float) -> None:
        log.info(title, **fields, percent=percent, left_s=round(left_s))

    return report


@contextmanager
def loading(
    model: Path, log: FilteringBoundLogger, *, to_console: bool
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a model's loading, and log its end.

    Yields a function to call with the number of loaded bytes and the total.

    Args:
        model: The model's folder.
        log: The service's logger.
        to_console: True to show a progress bar if standard error is a terminal.
    """
    started = time.monotonic()
    seconds: float | None = None
    with Progress(
        "loading", counts=False, bar=to_console, report=log_lines(log, model=str(model))
    ) as progress:

        def tell(loaded: int, total: int) -> None:
            nonlocal seconds
            if loaded >= total and seconds is None:
                seconds = round(time.monotonic() - started, 1)
            progress.tell(loaded, total)

        yield tell
    if seconds is not None:
        log.info("loaded", model=str(model), seconds=seconds)


def duration(seconds: float) -> str:
    """Return a duration in words, such as ``40 s``, ``3 min`` or ``1 h 20 min``."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
