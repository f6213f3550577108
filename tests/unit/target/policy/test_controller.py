"""Tests of the controller on synthetic machines: it finds the fastest shape and drops useless drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from outrider.services.target.policy.controller import (
    ExecutedRow,
    ExecutedStep,
    RowBound,
    RowState,
    SpeculationController,
)
from outrider.services.target.policy.cost_model import Acceptance, StepCosts
from outrider.shared.spec.tree import DraftShape

BOUND = DraftShape(5, 4, 16)


@dataclass
class Machine:
    """A synthetic machine: costs in seconds, and the probability that a node at each depth is accepted."""

    verify_base_s: float
    verify_row_s: float
    draft_level_s: float
    acceptance: float
    seed: int = 0

    def run(
        self, controller: SpeculationController, rows: list[RowState], rounds: int
    ) -> tuple[float, list[int]]:
        """Run rounds; return tokens per second per row, and the depth of the first row in each round."""
        rng = random.Random(self.seed)
        tokens, seconds = 0, 0.0
        depths = []
        for _ in range(rounds):
            shapes = controller.choose([RowBound(state, BOUND, 100) for state in rows], len(rows), 0)
            for shape in shapes:
                assert shape.depth <= BOUND.depth
                assert shape.max_nodes <= BOUND.max_nodes
            depth = max(shape.depth for shape in shapes)
            wait_s = depth * self.draft_level_s
            verify_s = self.verify_base_s + self.verify_row_s * sum(shape.max_nodes for shape in shapes)
            executed = []
            for state, shape in zip(rows, shapes, strict=True):
                accepted = 0
                while accepted < shape.depth and rng.random() < self.acceptance:
                    accepted += 1
                executed.append(ExecutedRow(state, shape.max_nodes, shape.depth, accepted))
                tokens += accepted + 1
            controller.observe(ExecutedStep(executed, depth, wait_s if depth else None, verify_s, 0.0002))
            seconds += wait_s + verify_s + 0.0002
            depths.append(shapes[0].depth)
        return tokens / seconds / len(rows), depths

    def plain_rate(self, batch_size: int = 1) -> float:
        return 1 / (self.verify_base_s + self.verify_row_s * batch_size + 0.0002)


def test_a_good_draft_is_used_in_full() -> None:
    machine = Machine(verify_base_s=0.005, verify_row_s=0.0001, draft_level_s=0.0004, acceptance=0.85)
    controller = SpeculationController()
    rate, depths = machine.run(controller, [controller.new_row()], 300)
    assert sorted(depths[50:])[len(depths[50:]) // 2] == 5
    assert rate > 2 * machine.plain_rate()


def test_a_useless_draft_costs_little() -> None:
    machine = Machine(verify_base_s=0.005, verify_row_s=0.0003, draft_level_s=0.001, acceptance=0.02)
    controller = SpeculationController()
    rate, depths = machine.run(controller, [controller.new_row()], 600)
    assert rate > 0.95 * machine.plain_rate()
    probes = [index for index, depth in enumerate(depths) if depth]
    gaps = [later - earlier for earlier, later in pairwise(probes[5:])]
    assert gaps == sorted(gaps), "gaps between probes must grow"


def test_a_new_request_starts_from_the_acceptance_of_others() -> None:
    machine = Machine(verify_base_s=0.005, verify_row_s=0.0003, draft_level_s=0.001, acceptance=0.02)
    controller = SpeculationController()
    machine.run(controller, [controller.new_row()], 300)
    _rate, depths = machine.run(controller, [controller.new_row()], 60)
    assert sum(depth > 0 for depth in depths) <= 2


def test_a_middling_draft_gets_a_shallow_tree() -> None:
    machine = Machine(verify_base_s=0.004, verify_row_s=0.0002, draft_level_s=0.0006, acceptance=0.65)
    controller = SpeculationController()
    _rate, depths = machine.run(controller, [controller.new_row()], 400)
    used = sorted(depths[100:])
    assert 1 <= used[len(used) // 2] <= 3


def test_a_draft_that_becomes_good_is_found_again() -> None:
    controller = SpeculationController()
    row = controller.new_row()
    Machine(0.005, 0.0001, 0.0004, acceptance=0.0).run(controller, [row], 200)
    _rate, depths = Machine(0.005, 0.0001, 0.0004, acceptance=0.9).run(controller, [row], 1000)
    assert sum(depth == 5 for depth in depths[-100:]) > 90


def test_large_arithmetic_bound_batches_do_not_draft() -> None:
    machine = Machine(verify_base_s=0.001, verify_row_s=0.0005, draft_level_s=0.001, acceptance=0.5)
    controller = SpeculationController()
    rate, depths = machine.run(controller, [controller.new_row() for _ in range(16)], 300)
    assert sum(depth > 0 for depth in depths[50:]) < 10
    assert rate > 0.93 * machine.plain_rate(16)


def test_a_row_that_never_accepts_is_dropped_from_a_batch_that_does() -> None:
    controller = SpeculationController()
    good, bad = controller.new_row(), controller.new_row()
    for _ in range(60):
        good.acceptance.trees.observe(5, 5)
        bad.acceptance.trees.observe(0, 5)
        controller.acceptance.trees.observe(3, 5)
    controller.costs.observe_verify(2, 2, 0.005)
    controller.costs.observe_verify(2, 32, 0.012)
    controller.costs.observe_draft(5, 0.002)
    bounds = [RowBound(good, BOUND, 100), RowBound(bad, BOUND, 100)]
    assert [shape.depth for shape in controller.choose(bounds, 2, 0)] == [0, 0], (
        "the first step of a batch size must be plain"
    )
    assert [shape.depth for shape in controller.choose(bounds, 2, 0)] == [5, 0]


def test_depth_is_bounded_by_the_tokens_left_to_emit() -> None:
    controller = SpeculationController()
    row = controller.new_row()
    Machine(0.005, 0.0001, 0.0004, acceptance=0.9).run(controller, [row], 40)
    (shape,) = controller.choose([RowBound(row, BOUND, 2)], 1, 0)
    assert shape.depth == 2
    (shape,) = controller.choose([RowBound(row, BOUND, 0)], 1, 0)
    assert not shape.drafts


def test_plain_steps_are_measured_ever_more_rarely() -> None:
    controller = SpeculationController()
    _rate, depths = Machine(0.005, 0.0001, 0.0004, acceptance=0.95).run(
        controller, [controller.new_row()], 1000
    )
    plain = [index for index, depth in enumerate(depths) if depth == 0]
    assert 3 <= len(plain) <= 6


def test_the_wait_cap_follows_the_measurements() -> None:
    controller = SpeculationController()
    bounds = [RowBound(controller.new_row(), BOUND, 100)]
    assert controller.wait_cap_s(bounds, 1) == pytest.approx(0.1), "nothing was measured yet"
    controller.costs.observe_verify(1, 1, 0.004)
    controller.costs.observe_verify(1, 16, 0.006)
    for _ in range(8):
        controller.costs.observe_answer(0.001)
    assert controller.wait_cap_s(bounds, 1) == pytest.approx(0.002), "twice the 99th percentile"
    for _ in range(128):
        controller.costs.observe_answer(0.5)
    for _ in range(50):
        bounds[0].state.acceptance.trees.observe(0, 5)
    assert controller.wait_cap_s(bounds, 1) == pytest.approx(0.003), "three quarters of a plain step"
    for _ in range(80):
        bounds[0].state.acceptance.trees.observe(5, 5)
    tokens = bounds[0].state.acceptance.trees.expected_tokens(5)[-1]
    assert tokens > 5
    assert controller.wait_cap_s(bounds, 1) == pytest.approx(0.75 * (tokens * 0.004 - 0.006)), (
        "the time that the expected tokens save"
    )


def test_verify_costs_are_interpolated() -> None:
    costs = StepCosts()
    costs.observe_verify(1, 1, 0.004)
    assert costs.verify(1, 16) > 0.004
    costs.observe_verify(1, 17, 0.008)
    assert costs.verify(1, 9) == pytest.approx(0.006)
    assert costs.verify(1, 33) == pytest.approx(0.012)
    assert costs.plain_step(3) == pytest.approx(0.004), "the nearest measured batch size is used"


def test_acceptance_forgets_and_starts_from_its_prior() -> None:
    prior = Acceptance()
    for _ in range(100):
        prior.observe(1, 2)
    fresh = Acceptance(prior)
    assert fresh.rate(1) > 0.9
    assert fresh.rate(2) < 0.2
    for _ in range(100):
        fresh.observe(0, 2)
    assert fresh.rate(1) < 0.2
    assert fresh.expected_tokens(2)[0] == 1.0


def test_times_of_provisional_steps_are_not_learned() -> None:
    """A round whose pieces are not recorded yet takes longer than later rounds of its kind."""
    controller = SpeculationController()
    row = controller.new_row()
    rows = [ExecutedRow(row, 16, 5, 4)]
    slow = ExecutedStep(rows, 5, 0.0, 0.04, 0.0, 0.05, provisional=True)
    for _ in range(8):
        controller.observe(slow)
    assert controller.costs.plain_round(1) is None
    assert controller.costs.most_rows(1) == SpeculationController().costs.most_rows(1)
    assert row.acceptance.trees.tried, "accepted drafts do not depend on graphs"
    assert controller.speedup_estimate is None
