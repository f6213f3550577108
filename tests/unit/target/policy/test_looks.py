"""The budget of looks: what they may cost, and which shape is next."""

from __future__ import annotations

import pytest

from outrider.services.target.policy.looks import FIRST_ROUNDS, LOOK_ROUNDS, LOOK_SHARE, MOST_ROUNDS, Looks
from outrider.shared.spec.tree import DraftShape

CHAIN, TREE = DraftShape(1, 1, 2), DraftShape(5, 8, 32)
PLAIN_S = 0.004


def test_nothing_is_affordable_before_a_plain_round_was_measured() -> None:
    looks = Looks()
    assert not looks.affordable
    assert looks.next({CHAIN: 0.0}, PLAIN_S) is None
    looks.earn(PLAIN_S, PLAIN_S)
    assert looks.next({CHAIN: 0.0}, PLAIN_S) == CHAIN
    assert looks.next({}, PLAIN_S) is None


def test_only_the_first_look_may_cost_twice_the_initial_balance() -> None:
    looks = Looks()
    looks.earn(PLAIN_S, PLAIN_S)
    loss_s = 1.9 * FIRST_ROUNDS * PLAIN_S / LOOK_ROUNDS
    assert looks.next({CHAIN: 1.1 * loss_s}, PLAIN_S) is None
    assert looks.next({CHAIN: loss_s}, PLAIN_S) == CHAIN
    looks.spend(CHAIN, 0.1 * PLAIN_S)
    assert looks.next({CHAIN: loss_s}, PLAIN_S) is None


@pytest.mark.parametrize("loss_s", [0.0005, 0.002, 0.02])
def test_looks_lose_a_fixed_share_of_the_time(loss_s: float) -> None:
    looks, rounds = Looks(), 40_000
    done = 0
    while done < rounds:
        looked = looks.next({CHAIN: loss_s}, PLAIN_S)
        for _ in range(LOOK_ROUNDS if looked else 4):
            done += 1
            looks.earn(PLAIN_S, PLAIN_S)
            if looked:
                looks.spend(looked, loss_s)
    first = FIRST_ROUNDS * PLAIN_S + LOOK_ROUNDS * loss_s
    assert 0.9 * LOOK_SHARE * rounds * PLAIN_S < looks.lost_s < LOOK_SHARE * rounds * PLAIN_S + first


def test_cheap_shapes_are_looked_at_more_often() -> None:
    looks = Looks()
    losses = {CHAIN: 0.001, TREE: 0.004}
    counts = dict.fromkeys(losses, 0)
    for _ in range(40_000):
        looks.earn(PLAIN_S, PLAIN_S)
        looked = looks.next(losses, PLAIN_S)
        if looked is not None:
            counts[looked] += 1
            for _ in range(LOOK_ROUNDS):
                looks.spend(looked, losses[looked])
    assert 2 < counts[CHAIN] / counts[TREE] < 6


def test_savings_are_bounded() -> None:
    looks = Looks()
    for _ in range(100_000):
        looks.earn(PLAIN_S, PLAIN_S)
    looks.spend(CHAIN, MOST_ROUNDS * PLAIN_S)
    assert not looks.affordable
