"""Runs a Typer application, and turns Outrider's errors into messages and exit codes."""

from __future__ import annotations

import sys

import typer

from outrider.shared.base.errors import ErrorCode, OutriderError

EXIT_CODES = {ErrorCode.INVALID_ARGUMENT: 2, ErrorCode.CANCELLED: 130}


def run_app(app: typer.Typer, name: str | None = None) -> None:
    """Run an application on the arguments of this process.

    Prints the message of an `OutriderError` and exits with 2 (invalid input), 130 (cancelled) or 1 (any other
    error).

    Args:
        app: The application.
        name: Name of the command in help texts. By default, the name of the program.
    """
    try:
        app(prog_name=name)
    except OutriderError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, highlight=False).print(
            Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True
        )
        sys.exit(EXIT_CODES.get(error.code, 1))
    except KeyboardInterrupt:
        sys.exit(130)
