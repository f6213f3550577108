"""Line charts and bar charts with a title, axes, and a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.plot.canvas import Canvas, Theme

WIDTH, HEIGHT = 760.0, 410.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 96.0, 70.0
DASHES = ("", "8 4", "2 3", "8 3 2 3")
BAR, THIN_BAR, GAP = 26.0, 15.0, 12.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        label: Name in the legend.
        points: (x, y) in the units of the axes, by ascending x.
        measured: The measured points, which are drawn as dots. With None, all points are drawn as dots.
    """

    label: str
    points: Sequence[tuple[float, float]]
    measured: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label and its ticks. The first and last ticks are its ends."""

    label: str
    ticks: Sequence[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 at the first tick to 1 at the last."""
        first, last = self.ticks[0], self.ticks[-1]
        if self.logarithmic:
            return math.log(value / first) / math.log(last / first)
        return (value - first) / (last - first)


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a picture: its title, a subtitle that describes it, and the source of its figures."""

    title: str
    subtitle: str
    source: str


def line_chart(
    theme: Theme, heading: Heading, x: Axis, y: Axis, series: Sequence[Series], reference: float | None = None
) -> str:
    """Return a line chart as SVG text.

    Args:
        theme: The colours of the chart.
        heading: Title, subtitle and source.
        x, y: The axes.
        series: The lines of the chart.
        reference: A value of y to mark, such as 1 for "no gain". With None, no value is marked.
    """
    canvas = Canvas(WIDTH, HEIGHT, theme, heading.title, f"{heading.subtitle} {_told(series)}")
    _head(canvas, heading, WIDTH, HEIGHT)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + x.place(point[0]) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y.place(point[1]) * (HEIGHT - TOP - BOTTOM)

    for tick in y.ticks:
        row = at((x.ticks[0], tick))[1]
        strong = reference is not None and tick == reference
        canvas.line(
            [(LEFT, row), (WIDTH - RIGHT, row)], theme.muted if strong else theme.grid, 1.5 if strong else 1
        )
        canvas.text(LEFT - 8, row + 4, f"{tick:g}", size=12, colour=theme.muted, anchor="end")
    for tick in x.ticks:
        column = at((tick, y.ticks[0]))[0]
        canvas.text(column, HEIGHT - BOTTOM + 18, f"{tick:g}", size=12, colour=theme.muted, anchor="middle")
    middle = (LEFT + WIDTH - RIGHT) / 2
    canvas.text(middle, HEIGHT - BOTTOM + 36, x.label, size=12, colour=theme.muted, anchor="middle")
    canvas.text(
        18, (TOP + HEIGHT - BOTTOM) / 2, y.label, size=12, colour=theme.muted, anchor="middle", turned=True
    )
    legend = LEFT
    for number, one in enumerate(series):
        colour, dashes = theme.series[number % len(theme.series)], DASHES[number % len(DASHES)]
        canvas.line([at(point) for point in one.points], colour, 2.5, dashes)
        for point in one.points if one.measured is None else one.measured:
            canvas.dot(*at(point), 4, colour)
        canvas.line([(legend, 74), (legend + 28, 74)], colour, 2.5, dashes)
        canvas.text(legend + 34, 78, one.label, size=12)
        legend += 54 + 6.6 * len(one.label)
    return canvas.render()


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its label, its value, and the value that is the goal, or None without a goal."""

    label: str
    value: float
    goal: float | None = None


def bar_chart(theme: Theme, heading: Heading, x: Axis, bars: Sequence[Bar]) -> str:
    """Return a chart of horizontal bars as SVG text. A mark on a bar is its goal."""
    left = 40 + 6.6 * max(len(bar.label) for bar in bars)
    height = TOP - 16 + len(bars) * (BAR + GAP) + BOTTOM
    told = "; ".join(f"{bar.label}: {bar.value:.2f}" for bar in bars)
    canvas = Canvas(WIDTH, height, theme, heading.title, f"{heading.subtitle} {told}.")
    _head(canvas, heading, WIDTH, height)

    def across(value: float) -> float:
        return left + min(1.0, max(0.0, x.place(value))) * (WIDTH - left - RIGHT)

    bottom = height - BOTTOM
    for tick in x.ticks:
        canvas.line([(across(tick), TOP - 20), (across(tick), bottom)], theme.grid)
        canvas.text(across(tick), bottom + 16, f"{tick:g}", size=12, colour=theme.muted, anchor="middle")
    for number, bar in enumerate(bars):
        y = TOP - 16 + number * (BAR + GAP)
        canvas.text(left - 8, y + BAR / 2 + 4, bar.label, size=12, anchor="end")
        canvas.box(left, y, across(bar.value) - left, BAR, fill=theme.series[0], radius=3)
        canvas.text(left + 10, y + BAR / 2 + 4, f"{bar.value:.2f}", size=12, bold=True, colour=theme.ground)
        if bar.goal is not None:
            canvas.line([(across(bar.goal), y - 4), (across(bar.goal), y + BAR + 4)], theme.series[1], 3)
    canvas.text((left + WIDTH) / 2, bottom + 34, x.label, size=12, colour=theme.muted, anchor="middle")
    return canvas.render()


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars that stand together: their label, and a value for each series. `sure` is False for estimates."""

    label: str
    values: Sequence[float]
    sure: Sequence[bool]


def group_chart(
    theme: Theme,
    heading: Heading,
    x: Axis,
    names: Sequence[str],
    groups: Sequence[BarGroup],
    reference: float | None = None,
) -> str:
    """Return a chart of grouped horizontal bars as SVG text. Bars of estimated values are drawn as outlines.

    Args:
        theme: The colours of the chart.
        heading: Title, subtitle and source.
        x: The axis of the values.
        names: Names of the series, for the legend. Each group has one value for each series.
        groups: The groups, from top to bottom.
        reference: A value of x to mark, such as 1 for "no gain". With None, no value is marked.
    """
    left = 40 + 6.6 * max(len(group.label) for group in groups)
    tall = THIN_BAR * len(names)
    height = TOP + len(groups) * (tall + GAP) + BOTTOM
    told = "; ".join(
        f"{group.label}: "
        + ", ".join(f"{value:.2f} for {name}" for name, value in zip(names, group.values, strict=True))
        for group in groups
    )
    canvas = Canvas(WIDTH, height, theme, heading.title, f"{heading.subtitle} {told}.")
    _head(canvas, heading, WIDTH, height)

    def across(value: float) -> float:
        return left + min(1.0, max(0.0, x.place(value))) * (WIDTH - left - 2 * RIGHT)

    bottom, legend = height - BOTTOM, LEFT
    for tick in x.ticks:
        strong = reference is not None and tick == reference
        colour = theme.muted if strong else theme.grid
        canvas.line([(across(tick), TOP - 8), (across(tick), bottom)], colour, 1.5 if strong else 1)
        canvas.text(across(tick), bottom + 16, f"{tick:g}", size=12, colour=theme.muted, anchor="middle")
    for number, name in enumerate(names):
        colour = theme.series[number % len(theme.series)]
        canvas.box(legend, 66, 14, 14, fill=colour, radius=2)
        canvas.text(legend + 20, 78, name, size=12)
        legend += 44 + 6.6 * len(name)
    for place, group in enumerate(groups):
        y = TOP + place * (tall + GAP)
        canvas.text(left - 8, y + tall / 2 + 4, group.label, size=12, anchor="end")
        for number, (value, sure) in enumerate(zip(group.values, group.sure, strict=True)):
            colour, at = theme.series[number % len(theme.series)], y + number * THIN_BAR
            fill = colour if sure else theme.ground
            canvas.box(left, at + 1, across(value) - left, THIN_BAR - 2, fill=fill, stroke=colour, radius=2)
            canvas.text(across(value) + 5, at + THIN_BAR - 4, f"{value:.2f}", size=10.5, colour=theme.muted)
    canvas.text((left + WIDTH) / 2, bottom + 34, x.label, size=12, colour=theme.muted, anchor="middle")
    return canvas.render()


def _head(canvas: Canvas, heading: Heading, width: float, height: float) -> None:
    canvas.text(24, 30, heading.title, size=17, bold=True)
    canvas.text(24, 50, heading.subtitle, size=12.5, colour=canvas.theme.muted)
    canvas.text(width - 12, height - 8, heading.source, size=10.5, colour=canvas.theme.muted, anchor="end")


def _told(series: Sequence[Series]) -> str:
    """Return the measured points in words, for screen readers."""
    lines = []
    for one in series:
        points = one.points if one.measured is None else one.measured
        lines.append(f"{one.label}: " + ", ".join(f"{y:.2f} at {x:g}" for x, y in points))
    return "; ".join(lines) + "."
