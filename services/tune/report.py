"""Prints the result of `outrider tune`: a table of mode `auto` and the shapes, with speed-ups as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.profile import profile_values, shape_json
from outrider.services.tune.result import BatchResult, Check, TuneResult
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

SHOWN = 12
"""Number of shapes in the table."""
BAR_CHARS = 24
"""Characters of the longest bar."""
LEAST_BAR_CHARS = 3
"""If the longest bar would be shorter, the table has no bars."""
GAP = 2
"""Characters between two columns."""
ACCEPT_HEADING = "accept\nlength"


def print_result(result: TuneResult, console: Console) -> None:
    """Print the measured shapes and the best predicted shapes. A ``~`` marks predictions."""
    shown = shown_shapes(result)
    names = [shape.name for shape in shown]
    values = [
        [f"{' ' if measured else '~'}{value:4.2f}" for value, measured in speedups]
        for speedups in ([shown_speedup(one, shape) for one in result.batches] for shape in shown)
    ]
    most = max(shown_speedup(one, shape)[0] for one in result.batches for shape in shown)
    value_chars = max(len(value) for row in values for value in row)
    # The columns of the batches share the width that the names and the accept lengths leave.
    room = console.width - max(map(len, names)) - len(ACCEPT_HEADING.partition("\n")[0]) - 2 * GAP
    width = room // len(result.batches) - GAP
    bar_chars = min(BAR_CHARS, width - value_chars - 1)
    table = Table(box=None, padding=(0, GAP, 0, 0))
    table.add_column("shape", no_wrap=True)
    table.add_column(ACCEPT_HEADING, justify="right", no_wrap=True)
    for one in result.batches:
        heading = f"{one.batch} at a time"
        table.add_column(heading if len(heading) <= width else f"{one.batch} at\na time", no_wrap=True)
    for shape, name, row in zip(shown, names, values, strict=True):
        cells = row
        if bar_chars >= LEAST_BAR_CHARS:
            speedups = (shown_speedup(one, shape)[0] for one in result.batches)
            bars = ("█" * max(1, round(bar_chars * speedup / most)) for speedup in speedups)
            cells = [f"{value} {bar}" for value, bar in zip(row, bars, strict=True)]
        length = "" if shape == result.limits else f"{result.accept_lengths.get(shape, 1.0):.2f}"
        table.add_row(name, length, *cells)
    console.print(table)
    if result.shape == NO_DRAFT:
        console.print("Drafting does not pay for this pair, device and prompts.")
    else:
        console.print(f"best shape for these numbers of requests: [bold]{result.shape.name}[/]")
    console.print(mode_line(result))
    if note := slower_note(result):
        console.print(note)
    for one in result.batches:
        if one.check is not None:
            console.print(
                f"{one.batch} at a time: {one.check.choice.name} has {one.check.ratio:.1%} of the "
                f"speed of {one.check.best.name}, the best of all shapes (median of "
                f"{len(one.check.ratios)} passes, {min(one.check.ratios):.1%} to {max(one.check.ratios):.1%})"
            )
    console.print(duration_line(result))


def duration_line(result: TuneResult) -> str:
    """Return a line that compares the duration of the search, without checks, with an exhaustive search."""
    seconds = sum(one.seconds for one in result.batches)
    exhaustive_s = sum(one.exhaustive_s for one in result.batches)
    if seconds >= exhaustive_s:
        return f"searched for {seconds:.0f} s"
    about = "" if all(one.check for one in result.batches) else "about "
    return (
        f"searched for {seconds:.0f} s: {about}{seconds / exhaustive_s:.1%} of the {exhaustive_s:.0f} s "
        "that measuring every shape takes"
    )


def mode_line(result: TuneResult) -> str:
    """Return a line with the best mode and, unless the mode is off, the default shape of the profile."""
    name = result.default_shape.name
    return {
        SpeculationMode.AUTO: f"best mode: [bold]auto[/], with shapes up to {name}",
        SpeculationMode.ON: f"best mode: [bold]on[/], with {name}",
        SpeculationMode.OFF: "best mode: [bold]off[/]",
    }[result.mode]


def slower_note(result: TuneResult) -> str:
    """Return a line with the batch sizes at which the best shape is slower than plain decoding, or ''."""
    if result.shape == NO_DRAFT:
        return ""
    there = " There, mode auto decodes plainly or with a smaller shape."
    speedups = [(one.batch, shown_speedup(one, result.shape)[0]) for one in result.batches]
    slower = [f"{batch} ({speedup:.2f} ×)" for batch, speedup in speedups if round(speedup, 2) < 1]
    if not slower:
        return ""
    return (
        f"{result.shape.name} is slower than plain decoding for these numbers of requests at a time: "
        f"{', '.join(slower)}." + (there if result.mode is SpeculationMode.AUTO else "")
    )


def shown_speedup(one: BatchResult, shape: DraftShape) -> tuple[float, bool]:
    """Return the speed-up of a shape, and whether it was measured instead of predicted."""
    if isinstance(shape, AutoLimits):
        return one.auto_speedup or 1.0, one.auto is not None
    speedup = one.speedup(shape)
    return (one.predicted.get(shape, 1.0), False) if speedup is None else (speedup, True)


def result_json(result: TuneResult) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "mode": result.mode.value,
        "limits": None if result.limits is None else shape_json(result.limits),
        "shape": shape_json(result.shape),
        "profile": profile_values(result),
        "seconds": round(result.seconds, 2),
        "accept_lengths": {shape.name: round(length, 3) for shape, length in result.accept_lengths.items()},
        "batches": [
            {
                "batch": one.batch,
                "best": one.best.name,
                "seconds": round(one.seconds, 2),
                "exhaustive_seconds": round(one.exhaustive_s, 2),
                "share_of_exhaustive": round(one.seconds / one.exhaustive_s, 4) if one.exhaustive_s else None,
                "contenders": [shape.name for shape in one.contenders],
                "tokens_per_s": {shape.name: round(speed, 2) for shape, speed in one.measured.items()}
                | ({} if one.auto is None else {"auto": round(one.auto, 2)}),
                "ratios_to_plain": rounded(one.ratios),
                "ratios_to_auto": rounded(one.to_auto),
                "predicted_speedup": {shape.name: round(speed, 3) for shape, speed in one.predicted.items()},
                "check": None if one.check is None else check_as_json(one.check),
            }
            for one in result.batches
        ],
    }


def rounded(ratios: Mapping[DraftShape, Sequence[float]]) -> dict[str, list[float]]:
    """Return the ratios of each pass by the names of the shapes."""
    return {shape.name: [round(ratio, 3) for ratio in passes] for shape, passes in ratios.items()}


def check_as_json(check: Check) -> dict[str, Any]:
    """Return a check as JSON values."""
    return {
        "choice": check.choice.name,
        "best_of_all": check.best.name,
        "ratio": round(check.ratio, 3),
        "ratios": [round(ratio, 3) for ratio in check.ratios],
        "seconds_of_all": round(check.seconds, 2),
    }


def shown_shapes(result: TuneResult) -> list[DraftShape]:
    """Return plain decoding, mode `auto`, the measured shapes, and the shapes with the best predictions."""
    measured = {shape for one in result.batches for shape in one.measured}
    first = result.batches[0]

    def value(shape: DraftShape) -> float:
        return first.speedup(shape) or first.predicted.get(shape, 1.0)

    rest = sorted(
        (shape for shape in result.accept_lengths if shape not in measured), key=lambda s: -value(s)
    )
    shown = sorted(measured - {NO_DRAFT}, key=lambda s: -value(s))
    auto = [] if result.limits is None else [result.limits]
    return [NO_DRAFT, *auto, *(shown + rest)[:SHOWN]]
