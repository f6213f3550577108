"""Predicts the duration of rounds of any tree shape from measured rounds of a few shapes.

    round = draft (depth, width)  +  verify (number of nodes)  +  rest

Drafting time is linear in the depth of the tree, and is interpolated between the measured widths. The time of
a verify pass is interpolated between the measured numbers of nodes. The rest is measured in rounds without
drafts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from outrider.shared.spec.tree import NO_DRAFT, DraftShape


def probe_shapes(candidates: Sequence[DraftShape]) -> list[DraftShape]:
    """Return the tree shapes whose rounds `outrider tune` measures.

    The shapes are:

    - plain decoding
    - the shortest and the longest chain
    - the smallest and the largest tree of the least width
    - the smallest and the largest tree of the greatest width
    - a tree of median size
    """
    chains = [shape for shape in candidates if shape.topk == 1]
    probes = [NO_DRAFT, *chains[:1], *chains[-1:]]
    trees = [shape for shape in candidates if shape.topk > 1]
    if trees:
        widths = sorted({shape.topk for shape in trees})
        for width in (widths[0], widths[-1]):
            ordered = sorted(
                (shape for shape in trees if shape.topk == width),
                key=lambda shape: (shape.depth, shape.max_nodes),
            )
            probes += [ordered[0], ordered[-1]]
        mean = sorted(shape.max_nodes for shape in trees)[len(trees) // 2]
        probes.append(min(trees, key=lambda shape: (abs(shape.max_nodes - mean), shape.depth)))
    return list(dict.fromkeys(probes))


class StepTimes:
    """Measured times of rounds of one batch size, in milliseconds."""

    def __init__(self) -> None:
        self._drafts: dict[DraftShape, float] = {}
        self._verify: dict[int, float] = {}
        self._rest = 0.0

    def add(self, shape: DraftShape, rounds: Iterable[Mapping[str, float]], round_ms: float | None) -> None:
        """Add the measured rounds of one tree shape.

        Args:
            shape: The shape of the rounds.
            rounds: Trace entries of the rounds. `draft_ms` and `verify_ms` are read from each entry. Leave
                out the first round of an answer, because its draft also processes the prompt.
            round_ms: Mean duration of these rounds on the client's clock, in milliseconds. None if it is
                unknown.
        """
        rounds = list(rounds)
        if not rounds:
            return
        draft_ms = statistics.median(one["draft_ms"] for one in rounds)
        verify_ms = statistics.median(one["verify_ms"] for one in rounds)
        if shape.drafts:
            self._drafts[shape] = draft_ms
        known = self._verify.get(shape.max_nodes)
        self._verify[shape.max_nodes] = verify_ms if known is None else min(known, verify_ms)
        if round_ms is not None and not shape.drafts:
            self._rest = max(0.0, round_ms - verify_ms)

    @property
    def measured(self) -> bool:
        """True if plain rounds and rounds with drafts were measured."""
        return bool(self._drafts) and NO_DRAFT.max_nodes in self._verify

    def round_ms(self, shape: DraftShape) -> float:
        """Return the predicted duration of a round of a shape."""
        drafting = self._draft_ms(shape) if shape.drafts else 0.0
        return drafting + _between(self._verify, shape.max_nodes) + self._rest

    def _draft_ms(self, shape: DraftShape) -> float:
        by_width: dict[int, dict[int, float]] = {}
        for known, draft_ms in self._drafts.items():
            by_width.setdefault(known.topk, {})[known.depth] = draft_ms
        # If a width was measured at one depth only, the time at another depth cannot be predicted from this
        # width.
        slopes = {width: depths for width, depths in by_width.items() if len(depths) > 1}
        widths = {width: _between(depths, shape.depth) for width, depths in (slopes or by_width).items()}
        # Drafts of chains run other code than drafts of trees.
        alike = {width: ms for width, ms in widths.items() if (width == 1) == (shape.topk == 1)}
        return _between(alike or widths, shape.topk)


def _between(known: Mapping[int, float], at: int) -> float:
    """Return the value at `at`, interpolated between known values or extrapolated from the nearest two."""
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]]
    upper = next((index for index, place in enumerate(places) if place >= at), len(places) - 1)
    upper = max(1, upper)
    low, high = places[upper - 1], places[upper]
    value = known[low] + (known[high] - known[low]) * (at - low) / (high - low)
    return max(0.0, value)
