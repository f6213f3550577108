"""Shows what the services of a stack are doing while they start."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.console import Console

from outrider.shared.obs.progress import Waiting, duration

LOG_LINE = re.compile(r"\] (?P<work>\w[\w ]*?) +\[.*\bleft_s=(?P<left_s>\d+)\b.*\bpercent=(?P<percent>\d+)\b")
"""A line that a service logs while it loads a model, compiles kernels or records CUDA graphs."""
READY = " ready after "


class StartBar:
    """A bar that shows what services do while they start, and how long. Use it as a context manager.

    Several threads may report to the bar. Without a terminal, there is a line about every 10 s.

    Args:
        console: Console of the bar; by default, standard error.
        print_text: Function that receives the lines. By default, they are printed to standard error.
    """

    def __init__(
        self, console: Console | None = None, print_text: Callable[[str], None] | None = None
    ) -> None:
        self._progress = Waiting("starting services", console=console, print_text=print_text)

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
        """Show a line that a service has printed, if it reports the progress of long work."""
        if found := LOG_LINE.search(line):
            left = duration(float(found["left_s"]))
            self._show(server, f"{service}, {found['work']}: {found['percent']} %, {left} left")

    def _show(self, server: str, text: str) -> None:
        self._progress.tell(0, step=f"{server}, {text}" if server else text)
