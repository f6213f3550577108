"""Paired measurements find the fastest shape on a machine whose speed varies more than the shapes differ."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.paired import PairedSpeeds, measure_paired
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

BEST, SECOND, SLOW = DraftShape(5, 4, 16), DraftShape(5, 1, 6), DraftShape(1, 1, 2)
SPEEDS = {NO_DRAFT: 100.0, BEST: 220.0, SECOND: 205.0, SLOW: 120.0}


class BusyMachine:
    """Has a speed that drifts by up to 40 %, and varies by 3 % from run to run."""

    def __init__(self, seed: int, noise: float = 0.03) -> None:
        self.rng = random.Random(seed)
        self.noise = noise
        self.share = 1.0
        self.runs: Counter[DraftShape] = Counter()

    def run(self, shape: DraftShape) -> float:
        self.runs[shape] += 1
        self.share = min(1.0, max(0.6, self.share + self.rng.uniform(-0.05, 0.05)))
        return SPEEDS[shape] * self.share * self.rng.lognormvariate(0, self.noise)


def test_the_choice_is_close_to_the_best_on_a_busy_machine() -> None:
    right = 0
    for seed in range(40):
        machine = BusyMachine(seed)
        speeds = measure_paired(machine.run, [SLOW, SECOND, BEST], 3, 7).speeds()
        right += max(speeds, key=lambda shape: speeds[shape]) == BEST
        assert machine.runs[SLOW] == 3, "a shape that is slower in every pass is left out"
    assert right >= 34


def test_measuring_ends_once_the_fastest_shape_is_known() -> None:
    machine = BusyMachine(0, noise=0.0)
    machine.rng.uniform = lambda low, high: 0.0  # type: ignore[method-assign]
    measure_paired(machine.run, [SLOW, SECOND, BEST], 3, 7)
    assert machine.runs == {NO_DRAFT: 3, SLOW: 3, SECOND: 3, BEST: 3}


def test_mode_auto_takes_part_in_every_pass_but_prolongs_nothing() -> None:
    machine = BusyMachine(0, noise=0.0)
    machine.rng.uniform = lambda low, high: 0.0  # type: ignore[method-assign]
    auto = AutoLimits(5, 4, 16)
    speeds = {**SPEEDS, auto: SPEEDS[BEST]}

    def run(shape: DraftShape) -> float:
        machine.runs[shape] += 1
        return speeds[shape] * (1 + 0.1 * (shape == auto) * machine.rng.random())

    measured = measure_paired(run, [SLOW, SECOND, BEST, auto], 3, 7)
    assert machine.runs == {NO_DRAFT: 3, SLOW: 3, SECOND: 3, BEST: 3, auto: 3}
    assert measured.ratios(auto) != measured.ratios(BEST)


def test_every_other_pass_runs_in_reverse_order() -> None:
    order: list[DraftShape] = []

    def run(shape: DraftShape) -> float:
        order.append(shape)
        return SPEEDS[shape]

    measured = measure_paired(run, [SLOW, BEST], 2, 2)
    assert order == [NO_DRAFT, SLOW, BEST, BEST, SLOW, NO_DRAFT]
    assert measured.speeds() == pytest.approx({shape: SPEEDS[shape] for shape in (NO_DRAFT, SLOW, BEST)})


def test_only_speeds_of_the_same_pass_are_compared() -> None:
    passes = [{NO_DRAFT: 100.0, BEST: 200.0}, {NO_DRAFT: 50.0, BEST: 105.0}, {NO_DRAFT: 80.0}]
    measured = PairedSpeeds(passes)
    assert measured.ratios(BEST) == pytest.approx([2.0, 2.1])
    assert measured.speeds()[BEST] == pytest.approx(80 * 2.05)
