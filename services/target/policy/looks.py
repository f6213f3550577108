"""Plans looks, i.e. rounds that measure tree shapes that are not in use, and limits the time that looks lose.

A look lasts a few rounds. In a look, a few requests draft with an unused shape, or all requests decode
plainly. A look updates the estimates of the acceptance and the cost of the shape. Its *loss* is the
additional time compared with the best choice for the same number of tokens. The losses of all looks are
limited to a fixed share of the time of all rounds, for all requests together.

For each shape, two numbers are added: the losses of its past looks, and the estimated loss of its next look.
The next look measures the shape with the smallest sum. Cheap shapes are therefore measured more often.

A possible look is *unsure* if the estimate of its loss may be too high. This is the case if the drafter is
new, or if only a few rounds with the shape were measured. It could take too long until the budget allows a
full look. An unsure look may therefore be brief: it has only as many rounds as the budget allows. A brief
look ends early if it loses more than the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.shared.spec.tree import DraftShape

LOOK_SHARE = 0.005
"""Share of the time of rounds that looks may lose."""
FIRST_ROUNDS = 2.0
"""Initial balance of the budget, as a number of plain rounds."""
DEAREST_BRIEF_ROUNDS = 2.0
"""With this balance, as a number of plain rounds, a brief look is possible, however large its estimated loss.
A look that needs a smaller balance is never brief.

The balance reaches this value after at most 400 plain rounds, unless earlier looks must still be paid."""
MOST_ROUNDS = 24.0
"""Largest balance of the budget, as a number of plain rounds."""
LOOK_ROUNDS = 4
"""Number of rounds of a full look. It lasts several rounds, because the drafter processes the earlier tokens
of the entries only once per look."""
LEAST_LOSS_SHARE = 0.01
"""Least estimated loss of a round of a look, as a share of a plain round."""
FADING = 0.9
"""Factor by which each new look reduces the recorded losses of all shapes, so that old losses fade."""


@dataclass(frozen=True, slots=True)
class LookOption:
    """A possible look: a few rounds that measure one tree shape.

    Attributes:
        loss_s: Estimated seconds that one round of the look loses, compared with the best choice.
        entries: Indices of the requests that take part.
        unsure: True if the estimate may be wrong. The look may then be brief.
    """

    loss_s: float
    entries: Sequence[int]
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """A look: the shape that it measures (`NO_DRAFT`: all decode plainly), and its number of rounds."""

    shape: DraftShape
    rounds: int = LOOK_ROUNDS

    @property
    def is_brief(self) -> bool:
        """True if the look has fewer rounds than a full look."""
        return self.rounds < LOOK_ROUNDS


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
        """Count `loss_s` seconds that a look has lost. The value is negative if the look has saved time."""
        self.lost_s += loss_s
        self._balance = min(self._most, (self._balance or 0.0) - loss_s)
        self._losses[shape] = max(0.0, self._losses.get(shape, 0.0) + loss_s)

    @property
    def affordable(self) -> bool:
        """True if the budget is not used up, so that some look may be affordable."""
        return self._balance is not None and self._balance > 0

    def next(self, options: Mapping[DraftShape, LookOption], plain_s: float) -> Look | None:
        """Return the next look, or None if no look is affordable.

        Args:
            options: The possible looks, by shape.
            plain_s: Duration of a plain round.
        """
        least = LEAST_LOSS_SHARE * plain_s
        due = {shape: max(option.loss_s, least) for shape, option in options.items()}
        if not due or self._balance is None:
            return None
        shape = min(due, key=lambda one: self._losses.get(one, 0.0) + LOOK_ROUNDS * due[one])
        rounds, needed_s = LOOK_ROUNDS, LOOK_ROUNDS * due[shape]
        brief_s = DEAREST_BRIEF_ROUNDS * plain_s
        # A look that costs more than the largest balance must still be possible.
        if self._balance < min(needed_s, self._most / 2):
            is_brief = options[shape].unsure and needed_s > brief_s
            if not is_brief or self._balance < min(due[shape], brief_s):
                return None
            rounds = max(1, int(self._balance / due[shape]))
        for known in self._losses:
            self._losses[known] *= FADING
        return Look(shape, rounds)
