"""Compares the tree shape that a search chose with the best of all shapes.

The fastest of many noisy measurements is often just lucky, and its measured speed is then too high. The check
therefore has three stages, and no stage uses the numbers of an earlier one:

1. One pass over all shapes selects the fastest ones.
2. Alternating passes over these shapes and the choice find the best shape.
3. Further alternating passes measure only the choice and the best shape. The median ratio of their speeds is
   the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.services.tune.paired import RunShape, measure_paired
from outrider.services.tune.result import Check
from outrider.shared.spec.tree import DraftShape

CHECKED = 8
"""Number of shapes that are measured again after one pass over all shapes."""


def check_choice(
    run: RunShape, choice: DraftShape, candidates: Sequence[DraftShape], tokens: Sequence[int], passes: int
) -> Check:
    """Find the best of all tree shapes, and compare the shape that the search chose with it.

    Args:
        run: Function that answers one part of the prompts with a given shape.
        choice: The shape that the search chose.
        candidates: All shapes.
        tokens: Number of tokens of the answers to each part of the prompts.
        passes: Number of passes of the second and the third stage.
    """
    once = measure_paired(run, candidates, tokens, 1, 1)
    first = sorted(candidates, key=once.speeds().__getitem__, reverse=True)[:CHECKED]
    rivals = measure_paired(run, list(dict.fromkeys([choice, *first])), tokens, passes, passes, narrow=True)
    speeds = rivals.speeds()
    best = max(rivals.passes[-1], key=lambda shape: speeds[shape])
    if best == choice:
        return Check(choice, best, [1.0] * passes, once.seconds)
    paired = measure_paired(run, [choice, best], tokens, passes, passes)
    return Check(choice, best, paired.ratios(choice, best), once.seconds)
