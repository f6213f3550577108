"""Starts services for a command that uses them, and shows what they are doing meanwhile."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from outrider.services.stack.launch import Stack, running_stack
from outrider.services.stack.options import StackOptions
from outrider.services.stack.start_bar import StartBar


@contextmanager
def started_services(
    options: StackOptions,
    kept_lines: int = 40,
    console: Console | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Stack]:
    """Start a stack of services, and stop it on exit.

    If the caller's code fails, the last lines of the services are printed to standard error.

    Args:
        options: Models and settings to serve.
        kept_lines: Number of lines to print after a failure.
        console: Console of the bar that shows the progress of the start; by default, standard error.
        tell: Called with the messages of `running_stack`. By default, the bar shows some of them.

    Yields:
        The running stack.

    Raises:
        ConfigurationError: An option is invalid, or a service stopped during startup.
        UnavailableError: The services were not ready in time.
    """
    log: deque[str] = deque(maxlen=kept_lines)
    bar = StartBar(console)

    def echo(service: str, line: str) -> None:
        log.append(f"{service} | {line}")
        bar.hear(service, line)

    try:
        with ExitStack() as cleanup:
            with bar:
                stack = cleanup.enter_context(running_stack(options, echo, tell or bar.tell))
            yield stack
    except Exception:
        print(*log, sep="\n", file=sys.stderr)
        raise
