"""The budget of looks: what they may cost, and which shape is next."""

from __future__ import annotations

import pytest

from outrider.services.target.policy.looks import (
    DEAREST_BRIEF_ROUNDS,
    FIRST_ROUNDS,
    LOOK_ROUNDS,
    LOOK_SHARE,
    MOST_ROUNDS,
    Look,
    LookOption,
    Looks,
)
from outrider.shared.spec.tree import DraftShape

CHAIN, TREE = DraftShape(1, 1, 2), DraftShape(5, 8, 32)
PLAIN_S = 0.004


def options(losses: dict[DraftShape, float], *, unsure: bool = False) -> dict[DraftShape, LookOption]:
    return {shape: LookOption(loss_s, [0], unsure) for shape, loss_s in losses.items()}


def test_nothing_is_affordable_before_a_plain_round_was_measured() -> None:
    looks = Looks()
    assert not looks.affordable
    assert looks.next(options({CHAIN: 0.0}), PLAIN_S) is None
    looks.earn(PLAIN_S, PLAIN_S)
    assert looks.next(options({CHAIN: 0.0}), PLAIN_S) == Look(CHAIN)
    assert looks.next({}, PLAIN_S) is None


def test_an_unsure_look_has_as_many_rounds_as_the_budget_can_pay() -> None:
    looks = Looks()
    looks.earn(PLAIN_S, PLAIN_S)
    dear_s = 0.9 * PLAIN_S
    assert looks.next(options({CHAIN: dear_s}), PLAIN_S) is None, "a full look is too expensive"
    look = looks.next(options({CHAIN: dear_s}, unsure=True), PLAIN_S)
    assert look == Look(CHAIN, 2)
    looks.spend(CHAIN, 2 * dear_s)
    assert looks.next(options({CHAIN: dear_s}, unsure=True), PLAIN_S) is None


@pytest.mark.parametrize("estimated_rounds", [3.0, 1000.0])
def test_an_unsure_shape_is_measured_again_however_dear_its_estimate(estimated_rounds: float) -> None:
    looks, rounds = Looks(), 0
    looks.earn(PLAIN_S, PLAIN_S)
    looks.spend(CHAIN, FIRST_ROUNDS * PLAIN_S)
    unsure = options({CHAIN: estimated_rounds * PLAIN_S}, unsure=True)
    while looks.next(unsure, PLAIN_S) is None:
        looks.earn(PLAIN_S, PLAIN_S)
        rounds += 1
    assert rounds <= DEAREST_BRIEF_ROUNDS / LOOK_SHARE + 1


@pytest.mark.parametrize("unsure", [False, True])
@pytest.mark.parametrize("loss_s", [0.0005, 0.002, 0.02])
def test_looks_lose_a_fixed_share_of_the_time(loss_s: float, unsure: bool) -> None:
    looks, rounds = Looks(), 40_000
    done = 0
    while done < rounds:
        looked = looks.next(options({CHAIN: loss_s}, unsure=unsure), PLAIN_S)
        for _ in range(looked.rounds if looked else 4):
            done += 1
            looks.earn(PLAIN_S, PLAIN_S)
            if looked:
                looks.spend(CHAIN, loss_s)
    first = FIRST_ROUNDS * PLAIN_S + LOOK_ROUNDS * loss_s
    assert 0.9 * LOOK_SHARE * rounds * PLAIN_S < looks.lost_s < LOOK_SHARE * rounds * PLAIN_S + first


def test_cheap_shapes_are_looked_at_more_often() -> None:
    looks = Looks()
    losses = {CHAIN: 0.001, TREE: 0.004}
    counts = dict.fromkeys(losses, 0)
    for _ in range(40_000):
        looks.earn(PLAIN_S, PLAIN_S)
        looked = looks.next(options(losses), PLAIN_S)
        if looked is not None:
            counts[looked.shape] += 1
            for _ in range(looked.rounds):
                looks.spend(looked.shape, losses[looked.shape])
    assert 2 < counts[CHAIN] / counts[TREE] < 6


def test_savings_are_bounded() -> None:
    looks = Looks()
    for _ in range(100_000):
        looks.earn(PLAIN_S, PLAIN_S)
    looks.spend(CHAIN, MOST_ROUNDS * PLAIN_S)
    assert not looks.affordable
