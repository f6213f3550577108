"""Paired measurements find the fastest shape on a machine whose speed varies more than the shapes differ."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.paired import PairedSpeeds, measure_paired
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

BEST, SECOND, THIRD, SLOW = (
    DraftShape(5, 4, 16),
    DraftShape(5, 1, 6),
    DraftShape(4, 1, 5),
    DraftShape(1, 1, 2),
)
SPEEDS = {NO_DRAFT: 100.0, BEST: 220.0, SECOND: 205.0, THIRD: 190.0, SLOW: 120.0}
TOKENS = [30, 50, 20, 40]


class BusyMachine:
    """Has a speed that drifts by up to 40 %, and varies by 3 % from run to run."""

    def __init__(self, seed: int, noise: float = 0.03) -> None:
        self.rng = random.Random(seed)
        self.noise = noise
        self.share = 1.0
        self.runs: Counter[DraftShape] = Counter()

    def run(self, shape: DraftShape, part: int) -> float:
        self.runs[shape] += 1
        step = 0.05 if self.noise else 0.0
        self.share = min(1.0, max(0.6, self.share + self.rng.uniform(-step, step)))
        return SPEEDS[shape] * self.share * self.rng.lognormvariate(0, self.noise)


def test_the_choice_is_close_to_the_best_on_a_busy_machine() -> None:
    right = 0
    for seed in range(40):
        machine = BusyMachine(seed)
        shapes = [NO_DRAFT, SLOW, THIRD, SECOND, BEST]
        speeds = measure_paired(machine.run, shapes, TOKENS, 3, 7, narrow=True).speeds()
        right += max(speeds, key=lambda shape: speeds[shape]) == BEST
        assert machine.runs[SLOW] == len(TOKENS), "the slowest shape drops out after the first pass"
        assert machine.runs[NO_DRAFT] == len(TOKENS), "plain decoding is far slower"
    assert right >= 38


def test_measuring_ends_once_the_fastest_shape_is_known() -> None:
    machine = BusyMachine(0, noise=0.0)
    measure_paired(machine.run, [NO_DRAFT, SLOW, THIRD, SECOND, BEST], [1], 3, 7, narrow=True)
    assert machine.runs == {NO_DRAFT: 1, SLOW: 1, THIRD: 3, SECOND: 3, BEST: 3}


def test_measuring_ends_if_the_shapes_left_are_equally_fast() -> None:
    machine = BusyMachine(0, noise=0.0)
    others = [DraftShape(depth, 1, depth + 1) for depth in (6, 7)]

    def run(shape: DraftShape, part: int) -> float:
        machine.runs[shape] += 1
        return 219.0 if shape in others else SPEEDS[shape]

    measure_paired(run, [NO_DRAFT, *others, BEST], [1], 3, 7, narrow=True)
    assert machine.runs == {NO_DRAFT: 1, BEST: 3, **dict.fromkeys(others, 3)}


def test_plain_decoding_is_compared_as_often_as_a_shape_if_it_may_be_the_fastest() -> None:
    runs: Counter[DraftShape] = Counter()
    speeds = {NO_DRAFT: [101.0, 97.0, 101.0, 99.0], SLOW: [100.0] * 4, SECOND: [80.0] * 4}

    def run(shape: DraftShape, part: int) -> float:
        runs[shape] += 1
        return speeds[shape][runs[shape] - 1]

    measure_paired(run, [NO_DRAFT, SLOW, SECOND], [1], 3, 4, narrow=True)
    assert runs == {NO_DRAFT: 4, SLOW: 4, SECOND: 3}


def test_shapes_that_differ_are_measured_until_the_time_is_used_up() -> None:
    changing = BusyMachine(1, noise=0.2)
    shapes = [NO_DRAFT, THIRD, SECOND, BEST]
    asked: list[float] = []

    def most_s(measured: PairedSpeeds) -> float:
        asked.append(measured.seconds)
        return asked[0] + 2.5 * measured.pass_seconds([SECOND])

    measured = measure_paired(changing.run, shapes, [10], 3, 9, narrow=True, most_s=most_s)
    assert 3 <= len(measured.passes) <= 5
    endless = measure_paired(BusyMachine(1, noise=0.2).run, shapes, [10], 3, 9, narrow=True)
    assert len(endless.passes) > len(measured.passes)


def test_mode_auto_takes_part_in_the_first_passes_but_prolongs_nothing() -> None:
    machine = BusyMachine(0, noise=0.0)
    auto = AutoLimits(5, 4, 16)
    speeds = {**SPEEDS, auto: SPEEDS[BEST]}

    def run(shape: DraftShape, part: int) -> float:
        machine.runs[shape] += 1
        return speeds[shape] * (1 + 0.1 * (shape == auto) * machine.rng.random())

    measured = measure_paired(run, [NO_DRAFT, SLOW, SECOND, BEST, auto], [1], 3, 7, narrow=True)
    assert machine.runs == {NO_DRAFT: 1, SLOW: 3, SECOND: 3, BEST: 3, auto: 3}
    assert measured.ratios(auto) != measured.ratios(BEST)


def test_all_shapes_answer_a_part_before_the_next_part_and_every_other_time_in_reverse_order() -> None:
    order: list[tuple[DraftShape, int]] = []

    def run(shape: DraftShape, part: int) -> float:
        order.append((shape, part))
        return SPEEDS[shape] * (1 + part)

    measured = measure_paired(run, [NO_DRAFT, SLOW, BEST], [20, 20], 2, 2)
    there, back = [NO_DRAFT, SLOW, BEST], [BEST, SLOW, NO_DRAFT]
    expected = [
        (shape, part) for part, shapes in ((0, there), (1, back), (0, back), (1, there)) for shape in shapes
    ]
    assert order == expected
    # The same number of tokens, once with the speed and once with twice the speed.
    mean = 2 / (1 / 1 + 1 / 2)
    assert measured.speeds() == pytest.approx({shape: mean * SPEEDS[shape] for shape in there})
    assert measured.ratios(BEST) == pytest.approx([2.2, 2.2])
    assert measured.seconds == pytest.approx(sum(2 * 40 / (mean * SPEEDS[shape]) for shape in there))
    assert measured.pass_seconds([SLOW]) == pytest.approx(40 / (mean * SPEEDS[SLOW]))


def test_only_speeds_of_the_same_pass_are_compared() -> None:
    passes = [{NO_DRAFT: [100.0], BEST: [200.0]}, {NO_DRAFT: [50.0], BEST: [105.0]}, {NO_DRAFT: [80.0]}]
    measured = PairedSpeeds([10], passes)
    assert measured.ratios(BEST) == pytest.approx([2.0, 2.1])
    speeds = measured.speeds()
    assert speeds[BEST] / speeds[NO_DRAFT] == pytest.approx(2.05, abs=0.002)


def test_a_disturbed_run_and_a_slow_pass_hardly_count() -> None:
    usual = {NO_DRAFT: [100.0, 100.0], SECOND: [205.0, 205.0], BEST: [220.0, 220.0]}
    disturbed = {**usual, BEST: [220.0, 110.0]}
    slow = {SECOND: [123.0, 123.0], BEST: [132.0, 132.0]}
    speeds = PairedSpeeds([10, 10], [usual, disturbed, usual, slow]).speeds()
    assert speeds[BEST] / speeds[SECOND] == pytest.approx(220 / 205, rel=1e-3)
    assert speeds[SECOND] / speeds[NO_DRAFT] == pytest.approx(2.05, rel=1e-3)
