"""Reports a benchmark's result: prints a table and writes a JSON file.

The file contains the command, the machine and every figure with its floor.
"""

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

NEW_RESULTS = Path("bench-results")
"""Default folder of new results, below the current folder. The recorded results are in bench/results."""
WIDTH = 160
"""Columns of a table that is not printed to a terminal."""
API_KEY, HIDDEN = "--api-key", "***"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure in a result file.

    Attributes:
        case: The measured case, e.g. ``round chain 5, batch 4``. Unique within a benchmark.
        value: The figure, in `unit`.
        unit: ``ms``, ``us``, ``tok/s``, ``GB/s``, ``TFLOP/s`` …
        floor: The best possible value on this machine, in the same unit: the smallest time or the highest
            rate. None if the figure has no floor.
        floor_of: The resource that determines the floor: ``bytes``, ``flops``, ``launch`` …
        more: Further figures of the case for the JSON file (percentiles, accept length …). The table shows a
            few of them.
    """

    case: str
    value: float
    unit: str
    floor: float | None = None
    floor_of: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Distance from the floor as a factor. The factor is usually at least 1, for times and for rates."""
        if not self.floor or not self.value:
            return None
        return self.floor / self.value if "/" in self.unit else self.value / self.floor

    def as_json(self) -> dict[str, Any]:
        """Return the row, including `ratio`, as JSON values."""
        plain = asdict(self)
        more = plain.pop("more")
        ratio = self.ratio
        return {**plain, "ratio": None if ratio is None else round(ratio, 4), **more}


def recorded_command() -> list[str]:
    """Return this process's command line, in a form that result files may contain.

    Absolute paths are reduced to their last part, because the folders differ between machines. The value of
    `--api-key` is left out.
    """
    given = sys.argv[1:]
    command = ["outrider"]
    for before, part in zip(["", *given], given, strict=False):
        if before == API_KEY or part.startswith(f"{API_KEY}="):
            part = HIDDEN if before == API_KEY else f"{API_KEY}={HIDDEN}"
        command.append(Path(part).name if part.startswith("/") else part)
    return command


def result_path(output: Path | None, name: str, device: str) -> Path:
    """Return the path of the file to write a result to.

    If `output` ends in .json, that path is returned. If `output` is a folder, the file is named
    ``<name>-<device>.json``. If `output` is None, the folder is `NEW_RESULTS`, and the file's name also
    contains the date and the time in UTC.
    """
    if output is None:
        return NEW_RESULTS / f"{name}-{device}-{time.strftime('%Y-%m-%dT%H%M%SZ', time.gmtime())}.json"
    return output if output.suffix == ".json" else output / f"{name}-{device}.json"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a benchmark run.

    Attributes:
        name: Name of the benchmark. The name of the result file begins with it.
        settings: The resolved settings of the run.
        rows: The figures.
        more: Further entries for the JSON file (a profile, single runs).
        note: A remark that a reader of the figures needs. The title of the table contains this remark.
    """

    name: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    more: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def save(self, output: Path | None) -> Path:
        """Write the JSON file and return its path. `result_path` explains `output`."""
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
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    def table(self, shown: Sequence[str] = ()) -> Table:
        """Return the rows as a table. `shown` lists the entries of a row's `more` to show as columns."""
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


def show_and_save(result: Result, output: Path | None, shown: Sequence[str] = ()) -> int:
    """Print the table, write the file and print its path. Returns the exit code."""
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
