"""Charts of one line of text, and the values of the last two minutes that `outrider top` draws with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

MOST_POINTS = 120
BARS = "▁▂▃▄▅▆▇█"
ChartValue = float | None
NUMBER = "{:,.0f}".format
MILLISECONDS = "{:.1f} ms".format


class Sparkline:
    """One line with a bar for each value. A line that is too short for all values shows means of neighbours.

    Args:
        values: The values, oldest first. None leaves a gap.
    """

    def __init__(self, values: Sequence[ChartValue]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(bars(self._values, max(1, options.max_width)), no_wrap=True)


def bars(values: Sequence[ChartValue], width: int) -> str:
    """Return a text with at most `width` bars: one for each value, or for each few neighbouring values.

    The highest bar stands for the largest value, and the lowest bar for zero.
    """
    if not values:
        return ""
    size = -(-len(values) // width)
    points = [_mean(values[start : start + size]) for start in range(0, len(values), size)]
    largest = max((point for point in points if point is not None), default=0.0) or 1.0
    return "".join(
        " " if point is None else BARS[round(max(0.0, point) / largest * (len(BARS) - 1))] for point in points
    )


class ChartHistory:
    """Values that a gateway does not remember. They are kept from the start of `outrider top`."""

    def __init__(self) -> None:
        self.kv_share: deque[ChartValue] = deque(maxlen=MOST_POINTS)
        self.draft_ms: deque[ChartValue] = deque(maxlen=MOST_POINTS)
        self.verify_ms: deque[ChartValue] = deque(maxlen=MOST_POINTS)

    def add(self, status: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Add the values between two replies of ``GET /status.json``."""
        pages = status["target"]["kv_pages"] if status["target"] else None
        self.kv_share.append(1 - pages["free"] / pages["total"] if pages and pages["total"] else None)
        self.draft_ms.append(mean_ms("draft_seconds", status["metrics"], before["metrics"]))
        self.verify_ms.append(mean_ms("verify_seconds", status["metrics"], before["metrics"]))


def mean_ms(name: str, metrics: Mapping[str, float], before: Mapping[str, float]) -> ChartValue:
    """Return the mean of a histogram between two sets of metrics, in ms. None if nothing was counted."""
    total, count = (
        metrics.get(f"outrider_{name}_{part}", 0.0) - before.get(f"outrider_{name}_{part}", 0.0)
        for part in ("sum", "count")
    )
    return total / count * 1e3 if count > 0 else None


def charts(status: Mapping[str, Any], history: ChartHistory | None) -> Table:
    """Return one line for each chart: its name, its bars and its latest value.

    Args:
        status: A reply of ``GET /status.json``.
        history: The values since the start of `outrider top`. None leaves out the charts of these values.
    """
    recent = status.get("recent") or {}
    rows: list[tuple[str, Sequence[ChartValue], Callable[[float], str]]] = [
        ("tokens/s", recent.get("tokens", ()), NUMBER),
        ("running requests", recent.get("running", ()), NUMBER),
        ("accept length", recent.get("accept_length", ()), "{:.2f}".format),
    ]
    if history is not None:
        rows += [
            ("KV cache in use", [*history.kv_share], percent),
            ("draft time per round", [*history.draft_ms], MILLISECONDS),
            ("verify time per pass", [*history.verify_ms], MILLISECONDS),
        ]
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True, min_width=len("999.9 ms"))
    for name, values, form in rows:
        known = [value for value in values if value is not None]
        table.add_row(name, Sparkline(values), form(known[-1]) if known else "–")
    return table


def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent. The operator's page uses the same form."""
    return f"{100 * share:.{digits}f} %"


def _mean(values: Sequence[ChartValue]) -> ChartValue:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
