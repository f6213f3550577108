"""Writes result files like those of `outrider bench`, and reads lines of the goals table made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.report.recorded import Results
from outrider.bench.report.tables import goal_lines

SETTINGS = {"shape": "llama3.1-8b", "prompt": 512, "new_tokens": 384, "device": "cuda", "transport": "inproc"}


def record(
    folder: Path,
    name: str,
    benchmark: str,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    date: str = "2026-01-01",
    gpus: Sequence[str] = (),
) -> None:
    """Write one result file."""
    content = {
        "benchmark": benchmark,
        "command": ["outrider", "bench", benchmark],
        "date": date,
        "machine": {"gpu_ids": gpus},
        "settings": settings,
        "rows": rows,
    }
    (folder / f"{name}.json").write_text(json.dumps(content))


def latency_row(case: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "case": case,
        "value": value,
        "unit": "ms",
        "floor": 3.3,
        "floor_of": "bytes",
        "ratio": value / 3.3,
        "batch": 1,
        **more,
    }


def line_of(folder: Path, what: str) -> str:
    return next(line for line in goal_lines(Results(folder)) if line.startswith(f"| {what} |"))
