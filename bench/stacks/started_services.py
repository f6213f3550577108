"""Starts the services that a benchmark measures, and shows on a terminal what they are doing meanwhile."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from outrider.services.stack.launch import Stack, running_stack
from outrider.services.stack.options import StackOptions
from outrider.shared.obs.progress import Progress, duration

LOG_LINE = re.compile(r"\] (?P<work>\w[\w ]*?) +\[.*\bleft_s=(?P<left_s>\d+)\b.*\bpercent=(?P<percent>\d+)\b")
"""A line that a service logs while it loads a model, compiles kernels or records CUDA graphs."""
READY = " ready after "


class StartBar:
    """A bar that shows what services do while they start. Use it as a context manager.

    Several threads may report to the bar. Without a terminal, the bar shows nothing.
    """

    def __init__(self) -> None:
        self._progress = Progress("starting services")

    def __enter__(self) -> StartBar:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(None, None, None)

    def tell(self, message: str, server: str = "") -> None:
        """Show a message of `running_stack`, if it says that a service is ready.

        Args:
            message: The message. The other messages, about the place of the draft, are too long for a bar.
            server: Name of the server, if several start at the same time.
        """
        if READY in message:
            self._show(server, message)

    def hear(self, service: str, line: str, server: str = "") -> None:
        """Show a line that a service has printed, if it tells the progress of long work."""
        if found := LOG_LINE.search(line):
            left = duration(float(found["left_s"]))
            self._show(server, f"{service}, {found['work']}: {found['percent']} %, {left} left")

    def _show(self, server: str, text: str) -> None:
        self._progress.tell(0, step=f"{server}, {text}" if server else text)


@contextmanager
def started_services(options: StackOptions, kept_lines: int = 40) -> Iterator[Stack]:
    """Start a stack of services for a benchmark, and stop it on exit.

    If the benchmark fails, the last lines of the services are printed to standard error.

    Args:
        options: Models and settings to serve.
        kept_lines: Number of lines to print after a failure.

    Yields:
        The running stack.

    Raises:
        ConfigurationError: An option is invalid, or a service stopped during startup.
        UnavailableError: The services were not ready in time.
    """
    log: deque[str] = deque(maxlen=kept_lines)
    bar = StartBar()

    def echo(service: str, line: str) -> None:
        log.append(f"{service} | {line}")
        bar.hear(service, line)

    try:
        with ExitStack() as cleanup:
            with bar:
                stack = cleanup.enter_context(running_stack(options, echo, bar.tell))
            yield stack
    except Exception:
        print(*log, sep="\n", file=sys.stderr)
        raise
