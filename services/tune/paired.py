"""Measures shapes in alternating passes, so that other work on the machine hardly affects the comparison.

The speed of a single run varies by several percent on a busy machine. Each pass therefore runs all shapes one
after the other, and only speeds of the same pass are compared. Every other pass runs in reverse order, so
that a machine that becomes faster or slower favours no shape. Shapes that are slower than the fastest one in
every pass take part in no further passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from outrider.shared.spec.tree import NO_DRAFT, DraftShape

EQUAL = 0.02
"""Shapes whose speeds differ by less than this share count as equally fast."""

Run = Callable[[DraftShape], float]
"""Runs the prompts with a shape. Returns tokens per second."""


class PairedSpeeds:
    """The speeds of several shapes, pass by pass.

    Args:
        passes: For each pass, the tokens per second of each shape. `NO_DRAFT` is part of every pass.
    """

    def __init__(self, passes: Sequence[dict[DraftShape, float]] = ()) -> None:
        self.passes = list(passes)

    @property
    def shapes(self) -> list[DraftShape]:
        """The shapes, in the order of the first pass."""
        return list(self.passes[0])

    def ratios(self, shape: DraftShape, other: DraftShape = NO_DRAFT) -> list[float]:
        """Return the speed of a shape divided by that of another shape, for each pass with both."""
        return [one[shape] / one[other] for one in self.passes if shape in one and other in one]

    def speeds(self) -> dict[DraftShape, float]:
        """Return the tokens per second of each shape: its median ratio to plain decoding × plain decoding."""
        plain = median(one[NO_DRAFT] for one in self.passes)
        return {shape: plain * median(self.ratios(shape)) for shape in self.shapes}

    def contenders(self) -> list[DraftShape]:
        """Return plain decoding, and the shapes that may still turn out to be the fastest ones.

        Return plain decoding alone if further passes would not change the choice by more than `EQUAL`.
        """
        speeds = self.speeds()
        first = max(self.passes[-1], key=lambda shape: speeds[shape])
        left = []
        for shape in self.passes[-1]:
            ratios = self.ratios(shape, first)
            if max(ratios) >= 1 or median(ratios) > 1 - EQUAL:
                left.append(shape)
        if all(abs(ratio - 1) < EQUAL for shape in left for ratio in self.ratios(shape, first)):
            return [NO_DRAFT]
        return list(dict.fromkeys([NO_DRAFT, *left]))


def measure_paired(run: Run, shapes: Sequence[DraftShape], least: int, most: int) -> PairedSpeeds:
    """Measure plain decoding and shapes in alternating passes.

    Args:
        run: Runs the prompts with a shape.
        shapes: The shapes, without `NO_DRAFT`.
        least: Number of passes in which all shapes take part.
        most: Largest number of passes. Measuring ends earlier if the fastest shape is known.
    """
    measured = PairedSpeeds()
    left = [NO_DRAFT, *shapes]
    for number in range(most):
        if number >= least:
            left = measured.contenders()
            if left == [NO_DRAFT]:
                break
        speeds = {shape: run(shape) for shape in (left if number % 2 == 0 else left[::-1])}
        measured.passes.append({shape: speeds[shape] for shape in left})
    return measured
