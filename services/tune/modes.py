"""Chooses the limits of mode `auto` from predicted speeds, and the default mode from measured speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.paired import EQUAL
from outrider.shared.spec.tree import DraftShape


def choose_limits(predicted: Mapping[int, Mapping[DraftShape, float]]) -> AutoLimits:
    """Return the limits within which mode `auto` is expected to be fast, but tries few useless shapes.

    The speed of limits is the geometric mean, over the batch sizes, of the best speed of a shape within the
    limits. Among limits whose speeds differ by less than `EQUAL`, the result has the fewest shapes that are
    slower than plain decoding at every batch size, and then the fewest nodes.

    Args:
        predicted: Batch size → shape → predicted speed, relative to plain decoding. Every batch size has the
            same shapes.
    """
    speeds: dict[DraftShape, float] = {}
    useless: dict[DraftShape, int] = {}
    for limits in next(iter(predicted.values())):
        paying: set[DraftShape] = set()
        offered: set[DraftShape] = set()
        logs = []
        for batch, speed in predicted.items():
            shapes = [shape for shape in shapes_within(limits, batch) if shape in speed]
            offered |= set(shapes)
            paying |= {shape for shape in shapes if speed[shape] > 1}
            # Where no shape pays, mode auto decodes without drafts.
            logs.append(math.log(max([1.0, *(speed[shape] for shape in shapes)])))
        speeds[limits], useless[limits] = math.exp(sum(logs) / len(logs)), len(offered - paying)
    enough = (1 - EQUAL) * max(speeds.values())
    near = (limits for limits, speed in speeds.items() if speed >= enough)
    best = min(near, key=lambda one: (useless[one], one.max_nodes, one.depth, one.topk))
    return AutoLimits(best.depth, best.topk, best.max_nodes)


def shapes_within(limits: DraftShape, batch: int) -> tuple[DraftShape, ...]:
    """Return the shapes that mode `auto` may choose within limits, for a number of concurrent requests."""
    chain = DraftShape(limits.depth, 1, limits.depth + 1)
    return offered_shapes(tuple(dict.fromkeys((limits, chain))), batch)


def faster(ratios: Sequence[float]) -> bool:
    """Return True if one choice is faster than another by more than the noise.

    The difference exceeds the noise if it is at least `EQUAL` and has the same sign in every pass. One pass
    alone does not show it.

    Args:
        ratios: Speed of the one choice divided by the speed of the other, for each pass with both.
    """
    return len(ratios) > 1 and min(ratios) > 1 and median(ratios) > 1 + EQUAL
