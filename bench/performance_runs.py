"""What ran, when and where: the lines below a table of docs/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.bench.performance_results import Recorded, read_result


def command_lines(sources: set[Path]) -> Iterator[str]:
    """Yield a line for the command of every file of results."""
    if sources:
        yield ""
        yield "Commands, and when and where they ran:"
        for path in sorted(sources):
            recorded = Recorded(path, read_result(path))
            yield run_line(path, recorded.command, recorded.occasion)


def run_line(path: Path, command: str, occasion: str) -> str:
    """Return the line of one file."""
    return f"- [{path.stem}](../bench/results/{path.name}): `{command}` ({occasion})"
