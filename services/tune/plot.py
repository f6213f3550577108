"""Draws the result of `outrider tune`: the speed-up of each shape, by number of concurrent requests."""

from __future__ import annotations

import math
from pathlib import Path

from outrider.bench.plot.canvas import DARK, LIGHT, Theme
from outrider.bench.plot.charts import Axis, BarGroup, Heading, group_chart
from outrider.services.tune.report import shown_shapes, shown_speedup
from outrider.services.tune.result import TuneResult
from outrider.shared.base.errors import ConfigurationError

STEPS = (0.25, 0.5, 1.0, 2.0, 5.0)
MOST_TICKS = 8


def picture(result: TuneResult, target: str, draft: str, theme: Theme) -> str:
    """Return an SVG bar chart of the speeds of mode `auto` and of tree shapes.

    Args:
        result: The result of the search.
        target, draft: Names of the target and the draft.
        theme: The colours.
    """
    groups = []
    for shape in shown_shapes(result):
        found = [shown_speedup(one, shape) for one in result.batches]
        groups.append(BarGroup(shape.name, [value for value, _ in found], [sure for _, sure in found]))
    most = max(value for group in groups for value in group.values)
    step = next((step for step in STEPS if most / step <= MOST_TICKS), STEPS[-1])
    ticks = tuple(step * number for number in range(math.ceil(most / step) + 1))
    heading = Heading(
        "Speed of the tree shapes",
        "Tokens per second ÷ plain decoding. Filled: measured. Outlined: estimated.",
        f"outrider tune: {target}, {draft}",
    )
    names = [f"{one.batch} at a time" for one in result.batches]
    return group_chart(theme, heading, Axis("times as fast as plain decoding", ticks), names, groups, 1.0)


def write_pictures(file: Path, result: TuneResult, target: str, draft: str) -> list[Path]:
    """Write the picture in both themes. Return the files, e.g. ``speed-light.svg`` for ``speed.svg``.

    Raises:
        ConfigurationError: A file cannot be written.
    """
    written = []
    for theme in (LIGHT, DARK):
        path = file.with_name(f"{file.stem}-{theme.name}.svg")
        try:
            path.write_text(picture(result, target, draft, theme), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"--plot {file}: cannot write {path}: {error}.", field="--plot"
            ) from error
        written.append(path)
    return written
