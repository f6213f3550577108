"""Tables of docs/performance.md about the machine's ceilings, kernels, startup and a served load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.bench.report.recorded import RecordedResult, Results
from outrider.bench.report.runs import command_lines

BOUND_BY = {"bytes": "bytes", "flops": "operations", "launch": "launch"}


def ceiling_lines(results: Results) -> Iterator[str]:
    """Yield the table of the machine's measured ceilings. Their floors are the rated values."""
    yield from _rows(results.latest("roofline"), "ceiling", "`outrider bench roofline`")


def load_lines(results: Results) -> Iterator[str]:
    """Yield the table of client latency under load. The floors are the figures of requests that ran alone."""
    recorded = results.latest("serve")
    yield from _rows(recorded, "load", "`outrider bench serve`")


def start_lines(results: Results) -> Iterator[str]:
    """Yield the table of recorded starts of a stack, with the latency of the first clients of each start."""
    recorded = results.starts()
    if not recorded:
        yield "Startup is not measured yet."
        return
    yield (
        "| kernels compiled at startup | kernels found in the cache | startup time "
        "| first load: time to first token, p50 | p99 |"
    )
    yield "| --- | --- | --- | --- | --- |"
    for stack in recorded:
        start = stack.content["start"]
        waits = [_shown(stack.row(f"time to first token, p{percent}") or {}) for percent in (50, 99)]
        cells = (
            str(start["kernels_compiled"]),
            str(start["kernels_cached"]),
            f"{start['seconds']:.1f} s",
            *waits,
        )
        yield f"| {' | '.join(cells)} |"
    yield from command_lines({stack.path for stack in recorded})


def kernel_lines(results: Results) -> Iterator[str]:
    """Yield the table of kernels. It has one line for each function and bounding resource."""
    recorded = results.latest("kernels", "rms_norm, 1 rows")
    if recorded is None:
        yield "The kernels are not measured yet."
        return
    yield "| function | cases | bound by | best × floor | worst × floor | worst case |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (function, bound), rows in _by_function(recorded.content["rows"]).items():
        ranked = sorted(rows, key=lambda row: float(row["ratio"]))
        best, worst = ranked[0], ranked[-1]
        case = str(worst["case"]).removeprefix(function).strip(" ,.").removeprefix("of ")
        cells = (
            f"`{function}`",
            str(len(rows)),
            BOUND_BY[bound],
            f"{best['ratio']:.2f}",
            f"{worst['ratio']:.2f}",
            f"{case}: {_shown(worst)}",
        )
        yield f"| {' | '.join(cells)} |"
    yield from command_lines({recorded.path})


def _by_function(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Return result rows of kernels, grouped by (function, bounding resource) in the given order.

    Rows of whole passes are left out, because the goals table contains them.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        function = str(row["case"]).split(maxsplit=1)[0].rstrip(",")
        if function not in ("forward", "propose") and row.get("ratio") is not None:
            found.setdefault((function, str(row["floor_of"])), []).append(row)
    return found


def _rows(recorded: RecordedResult | None, what: str, command: str) -> Iterator[str]:
    if recorded is None:
        yield f"{command} is not measured on a GPU yet."
        return
    yield f"| {what} | measured | floor | × floor |"
    yield "| --- | --- | --- | --- |"
    for row in recorded.content["rows"]:
        floor = f"{_number(row['floor'])} {row['unit']} ({row['floor_of']})"
        yield f"| {row['case']} | {_shown(row)} | {floor} | {row['ratio']:.2f} |"
    yield from command_lines({recorded.path})


def _shown(row: Mapping[str, Any]) -> str:
    return f"{_number(row['value'])} {row['unit']}" if row else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
