"""Tests of the controller's choice for device rounds: one shape for all rows, for several rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest

from outrider.services.target.policy.controller import (
    ExecutedRow,
    ExecutedStep,
    RowBound,
    RowState,
    SpeculationController,
)
from outrider.services.target.policy.cost_model import StepCosts
from outrider.services.target.policy.offered_shapes import TREE_DEPTHS, offered_shapes
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

BOUND = DraftShape(5, 4, 16)
CHAIN = DraftShape(10, 1, 11)


@dataclass
class Machine:
    """A synthetic machine. A round costs seconds per round, per row and per draft level."""

    base_s: float
    row_s: float
    level_s: float
    acceptance: float
    seed: int = 0

    def round_s(self, rows: int, depth: int) -> float:
        return self.base_s + self.row_s * rows + self.level_s * depth

    chain_acceptance: float = 0.0

    def run(
        self, controller: SpeculationController, rows: list[RowState], rounds: int, bound: DraftShape = BOUND
    ) -> tuple[float, list[int]]:
        """Run rounds; return tokens per second per row, and the depth of every round."""
        rate, shapes = self.run_forms(controller, rows, rounds, bound, NO_DRAFT)
        return rate, [shape.depth for shape in shapes]

    def run_forms(
        self,
        controller: SpeculationController,
        rows: list[RowState],
        rounds: int,
        bound: DraftShape,
        chain: DraftShape,
    ) -> tuple[float, list[DraftShape]]:
        """Run rounds; return tokens per second per row, and the shape of every round."""
        rng = random.Random(self.seed)
        tokens, seconds, shapes = 0, 0.0, []
        for _ in range(rounds):
            shape, *others = controller.choose_common([RowBound(state, bound, 100, chain) for state in rows])
            assert all(other == shape for other in others), "rows with equal bounds must get one shape"
            executed = []
            rate = self.chain_acceptance if shape.topk == 1 else self.acceptance
            for state in rows:
                accepted = 0
                while accepted < shape.depth and rng.random() < rate:
                    accepted += 1
                executed.append(ExecutedRow(state, shape.max_nodes, shape.depth, accepted, shape.topk == 1))
                tokens += accepted + 1
            taken = self.round_s(shape.max_nodes * len(rows), shape.depth)
            wait_s = 0.0 if shape.drafts else None
            controller.observe(ExecutedStep(executed, shape.depth, wait_s, 0.0, 0.0, taken))
            seconds += taken
            shapes.append(shape)
        return tokens / seconds / len(rows), shapes

    def best(self, batch_size: int, shapes: tuple[DraftShape, ...]) -> float:
        """Return the highest expected tokens per second per row over the shapes and plain decoding."""
        rates = [1 / self.round_s(batch_size, 0)]
        for shape in shapes:
            acceptance = self.chain_acceptance if shape.topk == 1 else self.acceptance
            tokens = sum(acceptance**depth for depth in range(shape.depth + 1))
            rates.append(tokens / self.round_s(shape.max_nodes * batch_size, shape.depth))
        return max(rates)


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
    assert gaps == sorted(gaps), "gaps between probes must grow"


def test_depths_come_from_a_small_set_and_are_kept() -> None:
    machine = Machine(base_s=0.004, row_s=0.00002, level_s=0.0006, acceptance=0.6)
    controller = SpeculationController()
    bound = DraftShape(7, 4, 16)
    _rate, depths = machine.run(controller, [controller.new_row()], 800, bound)
    assert set(depths) <= {0, 7, *TREE_DEPTHS}
    lengths = [len(list(run)) for _depth, run in groupby(depths)]
    assert min(lengths[:-1]) >= 4


def test_a_step_grows_no_more_than_twofold_at_a_time() -> None:
    machine = Machine(base_s=0.004, row_s=0.000001, level_s=0.00001, acceptance=0.95)
    controller = SpeculationController()
    _rate, depths = machine.run(controller, [controller.new_row() for _ in range(32)], 400)
    seen = 32
    for depth in depths:
        rows = 32 * (1 + -(-15 * depth // 5) if depth else 1)
        assert rows <= 2 * seen or depth == 1, "only the smallest shape may exceed twice the largest step"
        seen = max(seen, rows)
    assert depths[-1] == 5


def test_rounds_on_the_device_are_learned_as_a_whole() -> None:
    costs = StepCosts()
    assert costs.plain_round(1) is None
    costs.observe_round(1, 1, 0, 0.004)
    assert costs.plain_round(3) == 0.004
    assert costs.round(1, 1, 0) == 0.004
    assert costs.round(1, 16, 5) > 0.004, "rows must cost something before any part is measured"
    costs.observe_verify(1, 1, 0.006)
    costs.observe_verify(1, 16, 0.007)
    costs.observe_draft(5, 0.002)
    assert costs.round(1, 16, 5) == pytest.approx(0.004 + 0.001 + 0.002)
    costs.observe_round(1, 16, 5, 0.0055)
    assert costs.round(1, 16, 5) == 0.0055
    assert costs.most_rows(1) == 16


H200 = {"base_s": 0.0039, "row_s": 0.0000125, "level_s": 0.0002}
"""Similar to an 8B model on an H200: 64 rows cost a fifth more than one, and 512 rows three times as much."""


@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("acceptance", "chain_acceptance"), [(0.5, 0.3), (0.75, 0.6), (0.8, 0.78), (0.95, 0.94), (0.1, 0.05)]
)
def test_the_better_form_is_found_at_every_batch_size(
    batch_size: int, acceptance: float, chain_acceptance: float
) -> None:
    machine = Machine(**H200, acceptance=acceptance, chain_acceptance=chain_acceptance)
    controller = SpeculationController()
    states = [controller.new_row() for _ in range(batch_size)]
    machine.run_forms(controller, states, 600, BOUND, CHAIN)
    rate, _shapes = machine.run_forms(controller, states, 1500, BOUND, CHAIN)
    assert rate > 0.93 * machine.best(batch_size, offered_shapes((BOUND, CHAIN), batch_size))


@pytest.mark.parametrize("batch_size", [3, 8, 16])
def test_a_tree_much_larger_than_the_longest_chain_is_reached(batch_size: int) -> None:
    machine = Machine(base_s=0.004, row_s=0.0000005, level_s=0.0001, acceptance=0.9, chain_acceptance=0.3)
    controller = SpeculationController()
    tree = DraftShape(5, 8, 32)
    _rate, shapes = machine.run_forms(
        controller, [controller.new_row() for _ in range(batch_size)], 600, tree, DraftShape(5, 1, 6)
    )
    assert sum(shape == tree for shape in shapes[300:]) > 200


def test_a_large_batch_gets_chains_where_trees_are_too_expensive() -> None:
    machine = Machine(**H200, acceptance=0.75, chain_acceptance=0.65)
    controller = SpeculationController()
    _rate, shapes = machine.run_forms(
        controller, [controller.new_row() for _ in range(64)], 800, BOUND, CHAIN
    )
    used = shapes[400:]
    assert sum(shape.topk == 1 and shape.depth in (1, 2, 3) for shape in used) > 0.8 * len(used)


def test_a_draft_that_is_nearly_always_right_gets_chains_deeper_than_the_tree() -> None:
    machine = Machine(**H200, acceptance=0.97, chain_acceptance=0.96)
    controller = SpeculationController()
    _rate, shapes = machine.run_forms(controller, [controller.new_row()], 800, BOUND, CHAIN)
    assert sum(shape == CHAIN for shape in shapes[300:]) > 400


def test_trees_come_back_when_chains_begin_to_fail() -> None:
    controller = SpeculationController()
    rows = [controller.new_row()]
    Machine(**H200, acceptance=0.97, chain_acceptance=0.96).run_forms(controller, rows, 600, BOUND, CHAIN)
    _rate, shapes = Machine(**H200, acceptance=0.7, chain_acceptance=0.3).run_forms(
        controller, rows, 1500, BOUND, CHAIN
    )
    assert sum(shape.topk > 1 for shape in shapes[-500:]) > 400


def test_the_other_form_is_tried_ever_more_rarely() -> None:
    machine = Machine(**H200, acceptance=0.8, chain_acceptance=0.4)
    controller = SpeculationController()
    _rate, shapes = machine.run_forms(controller, [controller.new_row()], 3000, BOUND, CHAIN)
    looks = [
        index
        for index, (before, shape) in enumerate(pairwise(shapes))
        if shape.topk == 1 and shape.drafts and before.topk > 1
    ]
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps)


@dataclass
class MixedMachine:
    """Rounds in which some rows are not `auto`. The machine accepts each draft with the given probability."""

    acceptance: float
    others: int
    other_nodes: int
    row_s: float = 0.00001
    level_s: float = 0.0002
    seed: int = 0

    def run(
        self, controller: SpeculationController, groups: list[list[RowBound]], rounds: int
    ) -> list[list[DraftShape]]:
        """Run rounds; return for every round the shape of each group of rows with equal bounds."""
        rng = random.Random(self.seed)
        chosen = []
        for _ in range(rounds):
            rows = [row for group in groups for row in group]
            shapes = controller.choose_common(rows, len(rows) + self.others, self.other_nodes)
            executed = [ExecutedRow(None, self.other_nodes // self.others, 0, 0)] * self.others
            for row, shape in zip(rows, shapes, strict=True):
                accepted = 0
                while accepted < shape.depth and rng.random() < self.acceptance:
                    accepted += 1
                executed.append(
                    ExecutedRow(row.state, shape.max_nodes, shape.depth, accepted, shape.topk == 1)
                )
            depth = max(shape.depth for shape in shapes)
            nodes = sum(shape.max_nodes for shape in shapes) + self.other_nodes
            taken = 0.004 + self.row_s * nodes + self.level_s * depth
            controller.observe(ExecutedStep(executed, depth, 0.0 if depth else None, 0.0, 0.0, taken))
            firsts = [sum(map(len, groups[:index])) for index in range(len(groups))]
            for first, group in zip(firsts, groups, strict=True):
                assert len(set(shapes[first : first + len(group)])) == 1
            chosen.append([shapes[first] for first in firsts])
        return chosen


def bounds(controller: SpeculationController, count: int, bound: DraftShape = BOUND) -> list[RowBound]:
    return [RowBound(controller.new_row(), bound, 100) for _ in range(count)]


def test_rows_beside_plain_rows_draft_and_measure_a_plain_round_again() -> None:
    controller = SpeculationController()
    machine = MixedMachine(acceptance=0.9, others=4, other_nodes=4)
    shapes = [shape for (shape,) in machine.run(controller, [bounds(controller, 4)], 400)]
    assert not shapes[0].drafts, "the plain cost is measured first"
    assert sum(shape.drafts for shape in shapes) > 350
    assert any(not shape.drafts for shape in shapes[20:]), "the plain cost must be measured again"


def test_no_plain_round_is_probed_for_beside_rows_that_always_draft() -> None:
    controller = SpeculationController()
    controller.costs.observe_round(8, 8, 0, 0.004)
    machine = MixedMachine(acceptance=0.9, others=4, other_nodes=4 * 16)
    shapes = [shape for (shape,) in machine.run(controller, [bounds(controller, 4)], 300)]
    assert all(shape.drafts for shape in shapes[20:]), "a round with other trees measures no plain cost"


def test_rows_with_other_bounds_get_a_shape_of_their_own() -> None:
    controller = SpeculationController()
    machine = MixedMachine(acceptance=0.95, others=1, other_nodes=1)
    small = DraftShape(2, 2, 5)
    groups = [bounds(controller, 3), bounds(controller, 2, small)]
    chosen = machine.run(controller, groups, 300)
    assert {shapes[1].depth for shapes in chosen} <= {0, 1, 2}
    assert sum(shapes == [BOUND, small] for shapes in chosen[100:]) > 100


@pytest.mark.parametrize(("level_s", "pays"), [(0.00002, True), (0.0004, False)])
def test_one_row_among_plain_rows_drafts_if_that_delays_the_others_little(level_s: float, pays: bool) -> None:
    controller = SpeculationController()
    machine = MixedMachine(acceptance=0.9, others=15, other_nodes=15, row_s=0.000001, level_s=level_s)
    shapes = [shape for (shape,) in machine.run(controller, [bounds(controller, 1)], 300)]
    drafted = sum(shape.drafts for shape in shapes[100:])
    assert drafted > 150 if pays else drafted < 50
