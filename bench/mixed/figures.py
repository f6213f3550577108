"""The figures of `outrider bench mixed`, each with a name, a ratio and a goal, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from outrider.bench.mixed.cases import GOALS_HOLD_FOR, Section
from outrider.bench.report.record import Row


@dataclass(frozen=True, slots=True)
class MixedFigure:
    """One measured figure of a case of `outrider bench mixed`.

    Attributes:
        section, name: Part of the benchmark, and name of the figure. The pair is unique.
        value: The figure, in `unit`.
        unit: ``tok/s``, ``ms``, ``s`` or ``requests``.
        ratio: The figure divided by the figure that it is compared with. None if there is no such comparison.
        goal: Limit of `ratio`, or of `value` if there is no ratio or `limits_value` is set. None if no goal
            was set.
        at_least: True if `goal` is a lower limit.
        limits_value: True if `goal` is a limit of `value` although there is a ratio.
        more: Further entries for the JSON file.
    """

    section: Section
    name: str
    value: float
    unit: str
    ratio: float | None = None
    goal: float | None = None
    at_least: bool = True
    limits_value: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met. None without a goal."""
        if self.goal is None:
            return None
        compared = self.ratio if self._limits_ratio else self.value
        assert compared is not None, "a goal of the ratio needs a ratio"
        return compared >= self.goal if self.at_least else compared <= self.goal

    @property
    def shown_goal(self) -> str:
        """The goal as text, with the unit if the goal is a limit of `value`."""
        if self.goal is None:
            return "–"
        unit = "" if self._limits_ratio else f" {self.unit}"
        return f"{'≥' if self.at_least else '≤'} {self.goal:g}{unit}"

    def as_row(self) -> Row:
        """Return this figure as a row of the result file.

        The row's `ratio` is this figure's ratio. Rows of other benchmarks contain the distance from a floor
        (the best possible value) instead, but these figures have no floor.
        """
        more = {
            "section": self.section.value,
            "name": self.name,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "goal": self.goal,
            "goal_is": None if self.goal is None else "at least" if self.at_least else "at most",
            "goal_of": None if self.goal is None else "ratio" if self._limits_ratio else "value",
            "met": self.met,
            **self.more,
        }
        return Row(f"{self.section.value}: {self.name}", round(self.value, 4), self.unit, more=more)

    @property
    def _limits_ratio(self) -> bool:
        return self.ratio is not None and not self.limits_value


def figure_table(title: str, figures: Sequence[MixedFigure]) -> Table:
    """Return the table that the command prints."""
    goals = any(figure.goal is not None for figure in figures)
    table = Table(title=title, caption=GOALS_HOLD_FOR if goals else None)
    for name in ("part", "case", "figure", "ratio", "goal", "met"):
        table.add_column(name, justify="left" if name in ("part", "case") else "right")
    for figure in figures:
        met = "–" if figure.met is None else "yes" if figure.met else "no"
        ratio = "–" if figure.ratio is None else f"{figure.ratio:.3f}"
        shown = f"{figure.value:,.0f}" if abs(figure.value) >= 1000 else f"{figure.value:.4g}"
        table.add_row(
            figure.section.value, figure.name, f"{shown} {figure.unit}", ratio, figure.shown_goal, met
        )
    return table
