"""Makes the list of runs below a table: one line for each result file, with command, date and machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.bench.report.recorded import SESSION_FOLDER, RecordedResult, read_result


def command_lines(sources: set[Path]) -> Iterator[str]:
    """Yield a heading, and one line for each result file with the command of its run."""
    if sources:
        yield ""
        yield "Commands, with the date and machine of each run:"
        for path in sorted(sources):
            recorded = RecordedResult(path, read_result(path))
            yield run_line(path, recorded.command, recorded.provenance)


def run_line(path: Path, command: str, provenance: str) -> str:
    """Return the line of one file. `command` and `provenance` are empty if the file does not record them."""
    parts = [f"`{command}`"] if command else []
    parts += [f"({provenance})"] if provenance else []
    name = within(path)
    return f"- [{name.rpartition('.')[0]}](../bench/results/{name}): {' '.join(parts) or '(not recorded)'}"


def within(path: Path) -> str:
    """Return a file's name, preceded by the folder of its measuring session if it belongs to one."""
    return f"{path.parent.name}/{path.name}" if SESSION_FOLDER.fullmatch(path.parent.name) else path.name
