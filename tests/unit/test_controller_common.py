"""The controller's choice for batches whose rounds stay on the device: one shape for all rows, kept for some rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest

from outrider.services.target.controller import (
    COMMON_DEPTHS,
    ExecutedRow,
    ExecutedStep,
    RowBound,
    RowState,
    SpeculationController,
)
from outrider.services.target.cost_model import StepCosts
from outrider.shared.spec.tree import DraftShape

BOUND = DraftShape(5, 4, 16)


@dataclass
class Machine:
    """Rounds as one piece of work: a base, a cost per row, a cost per level of drafting; and how often a node is accepted."""

    base_s: float
    row_s: float
    level_s: float
    acceptance: float
    seed: int = 0

    def round_s(self, rows: int, depth: int) -> float:
        return self.base_s + self.row_s * rows + self.level_s * depth

    def run(
        self, controller: SpeculationController, rows: list[RowState], rounds: int, bound: DraftShape = BOUND
    ) -> tuple[float, list[int]]:
        """Return tokens per second per row, and the depth of every round."""
        rng = random.Random(self.seed)
        tokens, seconds, depths = 0, 0.0, []
        for _ in range(rounds):
            shape = controller.choose_common([RowBound(state, bound, 100) for state in rows])
            executed = []
            for state in rows:
                accepted = 0
                while accepted < shape.depth and rng.random() < self.acceptance:
                    accepted += 1
                executed.append(ExecutedRow(state, shape.max_nodes, shape.depth, accepted))
                tokens += accepted + 1
            taken = self.round_s(shape.max_nodes * len(rows), shape.depth)
            wait_s = 0.0 if shape.drafts else None
            controller.observe(ExecutedStep(executed, shape.depth, wait_s, 0.0, 0.0, taken))
            seconds += taken
            depths.append(shape.depth)
        return tokens / seconds / len(rows), depths


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_good_draft_is_used_in_full(batch_size: int) -> None:
    machine = Machine(base_s=0.004, row_s=0.000005, level_s=0.0002, acceptance=0.85)
    controller = SpeculationController()
    rate, depths = machine.run(controller, [controller.new_row() for _ in range(batch_size)], 600)
    assert sorted(depths[100:])[250] == 5
    assert rate > 2 / machine.round_s(batch_size, 0)
    estimate = controller.speedup_estimate
    assert estimate is not None
    assert estimate > 2


def test_a_useless_draft_costs_little() -> None:
    machine = Machine(base_s=0.004, row_s=0.0001, level_s=0.0005, acceptance=0.02)
    controller = SpeculationController()
    machine.run(controller, [controller.new_row()], 200)
    rate, depths = machine.run(controller, [controller.new_row()], 2000)
    assert rate > 0.95 / machine.round_s(1, 0)
    probes = [index for index, (depth, later) in enumerate(pairwise(depths)) if depth == 0 and later]
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert gaps == sorted(gaps), "probes back off"


def test_depths_are_of_a_small_set_and_are_kept() -> None:
    machine = Machine(base_s=0.004, row_s=0.00002, level_s=0.0006, acceptance=0.6)
    controller = SpeculationController()
    bound = DraftShape(7, 4, 16)
    _rate, depths = machine.run(controller, [controller.new_row()], 800, bound)
    assert set(depths) <= {0, 7, *COMMON_DEPTHS}
    lengths = [len(list(run)) for _depth, run in groupby(depths)]
    assert min(lengths[:-1]) >= 4


def test_a_step_grows_no_more_than_twofold_at_a_time() -> None:
    machine = Machine(base_s=0.004, row_s=0.000001, level_s=0.00001, acceptance=0.95)
    controller = SpeculationController()
    _rate, depths = machine.run(controller, [controller.new_row() for _ in range(32)], 400)
    seen = 32
    for depth in depths:
        rows = 32 * (1 + -(-15 * depth // 5) if depth else 1)
        assert rows <= 2 * seen or depth == 1, "only the smallest may be larger, or nothing could be tried"
        seen = max(seen, rows)
    assert depths[-1] == 5


def test_rounds_on_the_device_are_learnt_whole() -> None:
    costs = StepCosts()
    assert costs.plain_round(1) is None
    costs.observe_round(1, 1, 0, 0.004)
    assert costs.plain_round(3) == 0.004
    assert costs.round(1, 1, 0) == 0.004
    assert costs.round(1, 16, 5) > 0.004, "nothing is known of the parts: rows cost something"
    costs.observe_verify(1, 1, 0.006)
    costs.observe_verify(1, 16, 0.007)
    costs.observe_draft(5, 0.002)
    assert costs.round(1, 16, 5) == pytest.approx(0.004 + 0.001 + 0.002)
    costs.observe_round(1, 16, 5, 0.0055)
    assert costs.round(1, 16, 5) == 0.0055
    assert costs.most_rows(1) == 16
