"""The table of docs/performance.md: what was promised, and what recorded results say. Never typed by hand, so that it cannot drift."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.bench.performance_goals import GOALS
from outrider.bench.performance_results import Results, read_result
from outrider.shared.base.errors import ConfigurationError

BEGIN, END = "<!-- performance table: made by `outrider bench table` -->", "<!-- end of the performance table -->"
NOT_MEASURED = "not measured yet"


def run_table(results: Path, document: Path | None, check: bool) -> int:
    """Print the table, or write it into a document; see `outrider bench table`.

    Raises:
        ConfigurationError: The document has no place for it, or a result cannot be read.
    """
    made = "\n".join(table_lines(Results(results), results))
    if document is None:
        print(made)
        return 0
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ConfigurationError(f"{document} has no place for the table: it needs the lines\n{BEGIN}\n{END}", field="--document")
    before, rest = text.split(BEGIN, 1)
    new = f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END, 1)[1]}"
    if check:
        if new != text:
            print(f"{document} differs from the recorded results; run `outrider bench table --document {document}`.", file=sys.stderr)
        return int(new != text)
    document.write_text(new, encoding="utf-8")
    return 0


def table_lines(results: Results, folder: Path) -> Iterator[str]:
    """Yield the lines of the table, then the command of every file that it names."""
    yield "| | goal | ours | floor | × floor | peer | result |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    sources: dict[Path, None] = {}
    for goal in GOALS:
        figure = goal.find(results)
        if figure is None and goal.limit is None:
            continue
        if figure is None:
            yield f"| {goal.what} | {goal.text} | {NOT_MEASURED} | | | {goal.peer} | |"
            continue
        sources[figure.source] = None
        mark = "" if goal.met(figure) else " (missed)"
        cells = (goal.what, goal.text, f"**{figure.text}**{mark}", figure.floor, figure.ratio, figure.peer or goal.peer, figure.source.stem)
        yield "| " + " | ".join(cells) + " |"
    if sources:
        yield ""
        yield "Commands:"
        for path in sorted(sources):
            command = " ".join(str(part) for part in read_result(path).get("command", ()))
            yield f"- [{path.stem}](../bench/results/{path.name}): `{command}`"
