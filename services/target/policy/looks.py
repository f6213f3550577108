"""Plans looks, i.e. rounds that measure shapes that are not in use, and limits the time that looks lose.

In a look, a few rows draft with an unused shape for a few rounds, or all rows decode plainly. A look updates
the estimates of acceptance and of the cost of the shape. Its *loss* is the additional time compared with the
best choice for the same number of tokens. The losses of all looks are limited to a fixed share of the time of
all rounds, for all requests together.

The next look measures the shape with the smallest sum of two numbers: the losses of its past looks, and the
estimated loss of its next look. Cheap shapes are therefore measured more often.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.shared.spec.tree import DraftShape

LOOK_SHARE = 0.005
"""Share of the time of rounds that looks may lose."""
FIRST_ROUNDS = 2.0
"""Initial balance of the budget, as a number of plain rounds.

The first look may cost twice this balance, so that even a drafter with slow rounds is measured during the
first requests."""
MOST_ROUNDS = 24.0
"""Largest balance of the budget, as a number of plain rounds."""
LOOK_ROWS = 4
"""Number of rows that take part in a look."""
LOOK_ROUNDS = 4
"""Number of rounds of a look. A look lasts several rounds, because the drafter processes the earlier tokens
of the rows only once per look."""
LEAST_LOSS_SHARE = 0.01
"""Least estimated loss of a round of a look, as a share of a plain round."""
FADING = 0.9
"""Factor by which each new look reduces the recorded losses of all shapes, so that old losses fade."""


class Looks:
    """The budget for looks, and the time that the looks of each shape have lost, in seconds."""

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._balance: float | None = None
        self._most = 0.0
        self._losses: dict[DraftShape, float] = {}

    def earn(self, round_s: float, plain_s: float) -> None:
        """Count a round of `round_s` seconds. `plain_s` is the duration of a plain round of its size."""
        self._most = MOST_ROUNDS * plain_s
        if self._balance is None:
            self._balance = FIRST_ROUNDS * plain_s
        self._balance = min(self._most, self._balance + LOOK_SHARE * round_s)

    def spend(self, shape: DraftShape, loss_s: float) -> None:
        """Count a round of a look that lost `loss_s` seconds. The loss is negative if the look saved time."""
        self.lost_s += loss_s
        self._balance = min(self._most, (self._balance or 0.0) - loss_s)
        self._losses[shape] = max(0.0, self._losses.get(shape, 0.0) + loss_s)

    @property
    def affordable(self) -> bool:
        """True if the budget is not used up, so that some look may be affordable."""
        return self._balance is not None and self._balance > 0

    def next(self, losses: Mapping[DraftShape, float], plain_s: float) -> DraftShape | None:
        """Return the shape that the next look measures, or None if no look is affordable.

        Args:
            losses: For each shape that is not in use, the estimated loss of a round of a look, in seconds.
            plain_s: Duration of a plain round.
        """
        least = LEAST_LOSS_SHARE * plain_s
        due = {shape: max(loss, least) for shape, loss in losses.items()}
        if not due or self._balance is None:
            return None
        shape = min(due, key=lambda one: self._losses.get(one, 0.0) + LOOK_ROUNDS * due[one])
        credit = 0.0 if self._losses else FIRST_ROUNDS * plain_s
        # A look that costs more than the largest balance must still be possible.
        if self._balance + credit < min(LOOK_ROUNDS * due[shape], self._most / 2):
            return None
        for known in self._losses:
            self._losses[known] *= FADING
        return shape
