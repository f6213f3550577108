"""Measures tree shapes in alternating passes, so that other work on the machine hardly affects the result.

The speed of a single run varies by several percent on a busy machine. Each pass therefore runs all shapes one
after the other, and only speeds of the same pass are compared. Every other pass runs the shapes in reverse
order, so that a machine that becomes faster or slower favours no shape. A shape is dropped after some passes
if another shape was faster in every pass. Mode `auto` takes part in every pass, but does not prolong the
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from outrider.services.tune.candidates import AutoLimits
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

EQUAL = 0.02
"""Shapes whose speeds differ by less than this share count as equally fast."""

Run = Callable[[DraftShape], float]
"""Runs the prompts with a shape. Returns tokens per second."""


class PairedSpeeds:
    """The measured speeds of several tree shapes, pass by pass.

    Args:
        passes: For each pass, shape → tokens per second. Every pass contains `NO_DRAFT`.
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
        """Return `NO_DRAFT`, mode `auto`, and the shapes that may still turn out to be the fastest ones.

        If the speeds of all these shapes differ by less than `EQUAL`, it does not matter which of them is
        chosen. No shape is then left to measure, and only `NO_DRAFT` is returned.
        """
        speeds = self.speeds()
        auto = [shape for shape in self.passes[-1] if isinstance(shape, AutoLimits)]
        shapes = [shape for shape in self.passes[-1] if not isinstance(shape, AutoLimits)]
        first = max(shapes, key=lambda shape: speeds[shape])
        left = []
        for shape in shapes:
            ratios = self.ratios(shape, first)
            if max(ratios) >= 1 or median(ratios) > 1 - EQUAL:
                left.append(shape)
        if all(abs(ratio - 1) < EQUAL for shape in left for ratio in self.ratios(shape, first)):
            return [NO_DRAFT]
        return list(dict.fromkeys([NO_DRAFT, *left, *auto]))


def measure_paired(run: Run, shapes: Sequence[DraftShape], least: int, most: int) -> PairedSpeeds:
    """Measure plain decoding and several tree shapes in alternating passes.

    Args:
        run: Function that answers the prompts with a given shape.
        shapes: The shapes, without `NO_DRAFT`. `AutoLimits` stands for mode `auto`.
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
