"""Measures tree shapes in alternating passes, so that other work on the machine hardly affects the result.

The speed of a single run varies by several percent on a busy machine. Runs that are compared therefore lie
close together in time. The prompts are divided into *parts*. In each pass, all shapes answer the first part
one after the other, then all shapes answer the second part, and so on. Every other time, the shapes run in
reverse order, so that a machine that becomes faster or slower favours no shape.

A run of a part is compared only with the other runs of the same part in the same pass (see
`PairedSpeeds.speeds`). After each pass, the slower half of the shapes drops out, so that the passes that
follow measure the fast shapes more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from outrider.services.tune.candidates import AutoLimits
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

EQUAL = 0.02
"""Shapes whose speeds differ by less than this share count as equally fast."""
LEAST_LEFT = 3
"""Number of shapes that stay after some passes, even if all of them were slower than the fastest one."""
FAR = 0.75
"""Plain decoding with less than this share of the fastest shape's speed is measured in one pass only."""
POLISHES = 10
"""Number of iterations of the median polish. More of them change the speeds by less than 0.1 %."""

RunShape = Callable[[DraftShape, int], float]
"""Answers one part of the prompts with a shape. Returns tokens per second."""


class PairedSpeeds:
    """The measured speeds of several tree shapes, pass by pass.

    Args:
        tokens: Number of tokens of the answers to each part of the prompts.
        passes: For each pass, shape → tokens per second of each part. The first pass contains all shapes.
    """

    def __init__(
        self, tokens: Sequence[int], passes: Sequence[Mapping[DraftShape, Sequence[float]]] = ()
    ) -> None:
        self.tokens = tokens
        self.passes = list(passes)

    @property
    def shapes(self) -> list[DraftShape]:
        """The shapes, in the order of the first pass."""
        return list(self.passes[0])

    @property
    def seconds(self) -> float:
        """The duration of all runs."""
        return sum(self._total / self._speed(speeds) for one in self.passes for speeds in one.values())

    def ratios(self, shape: DraftShape, other: DraftShape = NO_DRAFT) -> list[float]:
        """Return the speed of a shape divided by that of another shape, for each pass with both."""
        both = [one for one in self.passes if shape in one and other in one]
        return [self._speed(one[shape]) / self._speed(one[other]) for one in both]

    def speeds(self) -> dict[DraftShape, float]:
        """Return the tokens per second of each shape, adjusted for slow and fast moments of the machine.

        The logarithm of the duration of a run is modelled as the sum of two terms. One term belongs to the
        shape and the part of the prompts. The other term belongs to the part and the pass: it is the state of
        the machine at that time. Tukey's median polish estimates both terms. A run that was disturbed thus
        hardly affects the result, and shapes with different numbers of passes can be compared.
        """
        found = {}
        for shape, costs in self._costs().items():
            weighted = (tokens * math.exp(cost) for tokens, cost in zip(self.tokens, costs, strict=True))
            found[shape] = self._total / sum(weighted)
        return found

    def faster_half(self, least: int) -> list[DraftShape]:
        """Return the shapes that the next pass measures.

        The faster half of the shapes stays, but at least `LEAST_LEFT` shapes. In the first `least` passes,
        mode `auto` also stays. Plain decoding stays in these passes unless it is far slower than the fastest
        shape. Later passes leave out mode `auto`, and each shape that the fastest one has beaten in every
        pass. The result is empty if all other shapes are as fast as the fastest one.
        """
        speeds, last, early = self.speeds(), self.passes[-1], len(self.passes) < least
        ranked = [
            shape
            for shape in sorted(last, key=lambda shape: -speeds[shape])
            if not isinstance(shape, AutoLimits) and (shape.drafts or not early)
        ]
        left = ranked[: max(LEAST_LEFT, math.ceil(len(ranked) / 2))]
        first = left[0]
        if early:
            plain = [shape for shape in last if shape == NO_DRAFT and speeds[shape] > FAR * speeds[first]]
            return [*plain, *left, *(shape for shape in last if isinstance(shape, AutoLimits))]
        ratios = {shape: self.ratios(shape, first) for shape in left}
        left = [s for s in left if max(ratios[s]) >= 1 or speeds[s] > (1 - EQUAL) * speeds[first]]
        return left if any(abs(ratio - 1) >= EQUAL for shape in left for ratio in ratios[shape]) else []

    def pass_seconds(self, shapes: Sequence[DraftShape]) -> float:
        """Return the expected duration of a pass over some of the shapes."""
        speeds = self.speeds()
        return sum(self._total / speeds[shape] for shape in shapes)

    @property
    def _total(self) -> int:
        return sum(self.tokens)

    def _speed(self, speeds: Sequence[float]) -> float:
        """Return the tokens per second of a whole pass."""
        return self._total / sum(tokens / speed for tokens, speed in zip(self.tokens, speeds, strict=True))

    def _costs(self) -> dict[DraftShape, list[float]]:
        """Return the logarithm of the seconds per token of each shape and part."""
        found: dict[DraftShape, list[float]] = {shape: [] for shape in self.shapes}
        for part in range(len(self.tokens)):
            runs = [{shape: -math.log(one[shape][part]) for shape in one} for one in self.passes]
            for shape, cost in _polished(runs).items():
                found[shape].append(cost)
        return found


def _polished(runs: Sequence[Mapping[DraftShape, float]]) -> dict[DraftShape, float]:
    """Return the term of each shape: a median polish of the passes × shapes, where entries may be missing."""
    cost = {shape: median(one[shape] for one in runs if shape in one) for shape in runs[0]}
    for _ in range(POLISHES):
        delays = [median(one[shape] - cost[shape] for shape in one) for one in runs]
        usual = median(delays)
        cost = {
            shape: median(one[shape] - delay for one, delay in zip(runs, delays, strict=True) if shape in one)
            + usual
            for shape in cost
        }
    return cost


def measure_paired(
    run: RunShape,
    shapes: Sequence[DraftShape],
    tokens: Sequence[int],
    least: int,
    most: int,
    *,
    narrow: bool = False,
    most_s: Callable[[PairedSpeeds], float] = lambda _: math.inf,
) -> PairedSpeeds:
    """Measure several tree shapes in alternating passes.

    Args:
        run: Function that answers one part of the prompts with a given shape.
        shapes: The shapes. `NO_DRAFT` stands for plain decoding, and `AutoLimits` for mode `auto`.
        tokens: Number of tokens of the answers to each part of the prompts.
        least: Least number of passes.
        most: Largest number of passes.
        narrow: True to drop the slower half of the shapes after each pass, and to end after `least` passes if
            the fastest shape is known. False to measure all shapes in `most` passes.
        most_s: Returns the largest duration of all runs, in seconds, after `least` passes.
    """
    measured = PairedSpeeds(tokens)
    left = list(shapes)
    for number in range(most):
        if number > 0 and narrow:
            left = measured.faster_half(least)
        if number >= least and (
            len(left) < 2 or measured.seconds + measured.pass_seconds(left) > most_s(measured)
        ):
            break
        speeds: dict[DraftShape, list[float]] = {shape: [] for shape in left}
        for part in range(len(tokens)):
            for shape in left if (number + part) % 2 == 0 else left[::-1]:
                speeds[shape].append(run(shape, part))
        measured.passes.append(speeds)
    return measured
