"""A synthetic machine with the costs of an H200. The times that it reports are noisy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.shared.spec.tree import DraftShape
from support.engine.auto_machine import Law, Machine, Server, tokens_of

Table = Sequence[tuple[int, float]]

PLAIN_S: Table = ((1, 3.7e-3), (16, 4.2e-3), (64, 5.1e-3), (256, 9e-3))
"""Seconds of a plain pass, by batch size."""
MORE_S: Table = ((0, 0.0), (48, 0.15e-3), (80, 0.4e-3), (192, 2.9e-3), (320, 5.5e-3), (1984, 46e-3))
"""Seconds by which a pass is longer than a plain pass, by its number of rows beyond one per sequence."""


@dataclass(frozen=True)
class NoisyMachine(Machine):
    """An 8B model on one H200, with the costs that `outrider bench auto` has measured.

    Attributes:
        spread: Standard deviation of the logarithm of each reported time.
        outlier_share: Share of rounds that are reported to take `outlier_s` longer.
        outlier_s: Additional seconds of these rounds.
        outliers_in_drafts: True if the drafts of these rounds take longer. False if the verify passes do.
        rng: Draws the noise.
        costs_s: The cost of each round so far, without noise.
    """

    spread: float = 0.0
    outlier_share: float = 0.0
    outlier_s: float = 0.03
    outliers_in_drafts: bool = False
    rng: random.Random = field(default_factory=random.Random)
    costs_s: list[float] = field(default_factory=list)

    def verify_s(self, batch_size: int, rows: int) -> float:
        return _interpolated(PLAIN_S, batch_size) + _interpolated(MORE_S, max(0, rows - batch_size))

    def draft_s(self, shape: DraftShape, count: int) -> float:
        """A chain of 3 takes 1 ms for 16 sequences, and a tree 5/8/32 takes 2.1 ms."""
        level_s = 0.27e-3 if shape.topk == 1 else 0.36e-3
        return (0.1e-3 + level_s * shape.depth) * (1 + count / 160)

    def round_s(self, shapes: Sequence[DraftShape]) -> tuple[float, float]:
        drafting, verifying = super().round_s(shapes)
        self.costs_s.append(drafting + verifying)
        drafting *= self.rng.lognormvariate(0, self.spread)
        verifying *= self.rng.lognormvariate(0, self.spread)
        if self.rng.random() < self.outlier_share:
            if self.outliers_in_drafts and drafting:
                drafting += self.outlier_s
            else:
                verifying += self.outlier_s
        return drafting, verifying


def expected_rate(server: Server, machine: NoisyMachine, law: Law, rounds: int) -> float:
    """Serve some rounds. Return their expected tokens per second at the machine's costs.

    Neither noise nor luck changes the result. It shows only which shapes were chosen.
    """
    first = len(server.rounds)
    for _ in range(rounds):
        server.round()
    tokens = sum(tokens_of(shape, law) for shapes in server.rounds[first:] for shape in shapes)
    return tokens / sum(machine.costs_s[-rounds:])


def _interpolated(table: Table, size: int) -> float:
    for (low, low_s), (high, high_s) in pairwise(table):
        if size <= high:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    raise ValueError(f"the table ends at {table[-1][0]}")
