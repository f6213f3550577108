"""What ran, when and where: the lines below a table of docs/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.bench.report.recorded import CALL, RecordedResult, read_result


def command_lines(sources: set[Path]) -> Iterator[str]:
    """Yield a line for the command of every file of results."""
    if sources:
        yield ""
        yield "Commands, and when and where they ran:"
        for path in sorted(sources):
            recorded = RecordedResult(path, read_result(path))
            yield run_line(path, recorded.command, recorded.occasion)


def run_line(path: Path, command: str, occasion: str) -> str:
    """Return the line of one file; `command` and `occasion` may be empty where the file does not tell."""
    told = [f"`{command}`"] if command else []
    told += [f"({occasion})"] if occasion else []
    return f"- [{within(path).rpartition('.')[0]}](../bench/results/{within(path)}): {' '.join(told) or '(not recorded)'}"


def within(path: Path) -> str:
    """Return a file's path within the folder of results: its name, behind that of its call where it is of one with a peer."""
    return f"{path.parent.name}/{path.name}" if CALL.fullmatch(path.parent.name) else path.name
