"""What every benchmark leaves: a table on the terminal, and a JSON file with the command, the machine and every figure beside its floor."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.report.machine import describe_machine
from outrider.bench.report.source import recorded_source
from outrider.bench.report.surroundings import recorded_environment

RESULTS = Path("bench/results")
WIDTH = 160
"""Columns of a table that goes to a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        case: What was measured, e.g. ``round chain 5, batch 4``; unique within a benchmark.
        value: The figure, in `unit`.
        unit: ``ms``, ``us``, ``tok/s``, ``GB/s``, ``TFLOP/s`` …
        floor: The best that the machine could do, in the same unit: of a time the least, of a rate the most; None where there is none.
        floor_of: What bounds it: ``bytes``, ``flops``, ``launch`` …
        more: Further figures of the case (percentiles, accept length …) for the JSON; a few are shown.
    """

    case: str
    value: float
    unit: str
    floor: float | None = None
    floor_of: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times the floor; at least about 1, for times and rates alike."""
        if not self.floor or not self.value:
            return None
        return self.floor / self.value if "/" in self.unit else self.value / self.floor

    def as_json(self) -> dict[str, Any]:
        """Return the row with its ratio."""
        plain = asdict(self)
        more = plain.pop("more")
        ratio = self.ratio
        return {**plain, "ratio": None if ratio is None else round(ratio, 4), **more}


def recorded_command() -> list[str]:
    """Return this process's command for a result; of absolute paths only the names, which are all that another machine has."""
    return ["outrider", *(Path(part).name if part.startswith("/") else part for part in sys.argv[1:])]


def result_path(output: Path | None, name: str, device: str) -> Path:
    """Return where a result goes: to `output` if that ends in .json, else into it (or `bench/results`) by its name; makes the folder."""
    folder = output or RESULTS
    path = folder if folder.suffix == ".json" else folder / f"{name}-{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark that ran.

    Attributes:
        name: Of the benchmark; begins the file's name.
        settings: What it ran with, resolved.
        rows: Its figures.
        more: Whatever else the JSON shall hold (a profile, single runs).
        note: What a reader of the table must know of its figures; stands in the title.
    """

    name: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    more: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def save(self, output: Path | None) -> Path:
        """Write the JSON; see `result_path`."""
        machine = describe_machine()
        path = result_path(output, self.name, str(self.settings.get("device", "cpu")).split(":")[0])
        content = {
            "benchmark": self.name,
            "command": recorded_command(),
            "environment": recorded_environment(),
            "source": recorded_source(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine,
            "settings": dict(self.settings),
            "rows": [row.as_json() for row in self.rows],
            **self.more,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    def table(self, shown: Sequence[str] = ()) -> Table:
        """Return the rows as a table; `shown` names the entries of `more` that get columns."""
        where = self.settings.get("machine") or self.settings.get("device", "")
        table = Table(title=f"{self.name}: {where}" + (f", {self.note}" if self.note else ""))
        for name in ("case", "figure", "floor", "× floor", *shown):
            table.add_column(
                name, justify="left" if name == "case" else "right", overflow="fold", no_wrap=name == "case"
            )
        for row in self.rows:
            floor = (
                "–"
                if row.floor is None
                else f"{_number(row.floor)} ({row.floor_of})"
                if row.floor_of
                else _number(row.floor)
            )
            ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
            cells = (_cell(row.more.get(name)) for name in shown)
            table.add_row(row.case, f"{_number(row.value)} {row.unit}", floor, ratio, *cells)
        return table


def finish(result: Result, output: Path | None, shown: Sequence[str] = ()) -> int:
    """Print the table, write the file, say where it is. Returns the exit code."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(result.table(shown))
    console.print(f"wrote {result.save(output)}", soft_wrap=True)
    return 0


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return _number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
