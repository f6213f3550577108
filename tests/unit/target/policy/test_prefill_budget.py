"""The number of prompt tokens that fit into a time budget, as measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from outrider.services.target.model.prefill_graph import PREFILL_SIZES
from outrider.services.target.policy.prefill_budget import (
    FIRST_RATE,
    LEAST_MEASURED,
    LEAST_TOKENS,
    PrefillBudget,
)


def test_before_any_measurement_a_usual_rate_is_assumed() -> None:
    assert PrefillBudget(0.1).tokens(0) == int(0.1 * FIRST_RATE)


def test_measured_passes_fit_into_the_budget() -> None:
    budget = PrefillBudget(0.02)
    for _ in range(50):
        budget.observe(2000, 2000, 2000 / 5000)
    assert budget.tokens(1900) == pytest.approx(0.02 * 5000, abs=1)


def test_a_prompt_always_advances() -> None:
    budget = PrefillBudget(0.001)
    budget.observe(1000, 1000, 60.0)
    assert budget.tokens(0) == LEAST_TOKENS


def test_one_outlier_does_not_change_the_limit_much() -> None:
    budget = PrefillBudget(0.1)
    for _ in range(20):
        budget.observe(1000, 1000, 0.1)
    budget.observe(1000, 1000, 0.2)
    assert 700 < budget.tokens(1000) < 1000


def test_long_contexts_are_measured_apart_and_the_nearest_is_used() -> None:
    budget = PrefillBudget(1.0)
    budget.observe(1000, 1000, 0.1)
    budget.observe(1000, 30_000, 0.5)
    assert budget.tokens(1000) == 10_000
    assert budget.tokens(25_000) == 2000
    assert budget.tokens(0) == 10_000
    assert budget.tokens(2000) == 10_000
    assert budget.tokens(1_000_000) == 2000


@pytest.mark.parametrize(("tokens", "seconds"), [(LEAST_MEASURED - 1, 1.0), (1000, 0.0), (1000, -1.0)])
def test_passes_that_say_nothing_about_the_rate_are_ignored(tokens: int, seconds: float) -> None:
    budget = PrefillBudget(0.1)
    budget.observe(tokens, 1000, seconds)
    assert budget.tokens(1000) == int(0.1 * FIRST_RATE)


def test_short_passes_say_little_about_long_ones() -> None:
    """Every pass reads all weights, so a pass over 100 tokens takes nearly as long as one over 200."""
    budget = PrefillBudget(0.02)
    budget.observe(800, 800, 0.02)
    for _ in range(20):
        budget.observe(100, 1000, 0.005)
    assert budget.tokens(1000) == 800
    budget.observe(100, 1000, 0.03)
    assert budget.tokens(1000) < 800, "a pass beyond the budget always counts"


@dataclass(frozen=True)
class Device:
    """A synthetic device: the seconds of a pass over prompt tokens.

    Attributes:
        floor_s: Seconds of the shortest pass.
        token_s: Seconds per token.
        pair_s: Seconds per pair of a token and a token of its context.
    """

    floor_s: float
    token_s: float
    pair_s: float

    def seconds(self, start: int, tokens: int) -> float:
        return max(self.floor_s, tokens * self.token_s) + tokens * (start + tokens / 2) * self.pair_s


FAST = Device(0.004, 23e-6, 1.2e-9)
SLOW = Device(0.010, 200e-6, 1e-8)
HOST_BOUND = Device(0.015, 20e-6, 1e-9)
ROUND_S = 0.005


def prefill(
    budget: PrefillBudget, device: Device, length: int, recorded: Sequence[int] = ()
) -> list[tuple[int, float]]:
    """Prefill a prompt beside decoding streams. Return the tokens and seconds of its chunks."""
    stored, passes = 0, []
    while stored < length:
        limit = budget.tokens(stored)
        size = max((one for one in recorded if one <= limit), default=limit)
        tokens = min(size, length - stored)
        seconds = device.seconds(stored, tokens)
        stored += tokens
        budget.observe(tokens, stored, seconds)
        passes.append((tokens, seconds))
    return passes


@pytest.mark.parametrize("recorded", [(), PREFILL_SIZES], ids=["any size", "recorded sizes"])
@pytest.mark.parametrize("device", [FAST, SLOW, HOST_BOUND], ids=["fast", "slow", "host-bound"])
def test_pauses_stay_near_the_budget_once_a_prompt_was_seen(
    device: Device, recorded: tuple[int, ...]
) -> None:
    budget = PrefillBudget(0.02)
    prefill(budget, device, 12_000, recorded)
    for length in (12_000, 300, 5_000, 40, 30_000):
        passes = prefill(budget, device, length, recorded)
        least = device.seconds(length, LEAST_TOKENS)
        assert max(seconds for _, seconds in passes) <= max(1.45 * 0.02, least)


def test_a_prompt_beside_streams_takes_at_most_half_as_long_again_as_alone() -> None:
    budget = PrefillBudget(0.02)
    prefill(budget, FAST, 12_000, PREFILL_SIZES)
    passes = prefill(budget, FAST, 12_000, PREFILL_SIZES)
    alone = FAST.seconds(0, 8192) + FAST.seconds(8192, 12_000 - 8192)
    beside = sum(seconds for _, seconds in passes) + ROUND_S * len(passes)
    assert beside <= 1.5 * alone


def test_prompts_of_the_lengths_of_a_server_do_not_shrink_the_limit() -> None:
    """Whatever the mixture, the limit stays near the number of tokens that the device computes in time."""
    rng = random.Random(0)
    budget = PrefillBudget(0.02)
    prefill(budget, FAST, 4_000)
    for _ in range(300):
        prefill(budget, FAST, rng.choice([20, 70, 100, 150, 400, 1500]))
    assert budget.tokens(1000) >= 0.75 * 0.02 / FAST.token_s


def test_one_long_pause_hardly_changes_the_limit() -> None:
    budget = PrefillBudget(0.02)
    for _ in range(5):
        budget.observe(800, 800, 0.02)
    budget.observe(800, 800, 5.0)
    assert budget.tokens(800) >= 400
    for _ in range(8):
        budget.observe(budget.tokens(800), 800, budget.tokens(800) * 0.02 / 800)
    assert budget.tokens(800) >= 760
