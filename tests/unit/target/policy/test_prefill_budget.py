"""The number of prompt tokens that fit into a time budget, as measured."""

from __future__ import annotations

import pytest

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
