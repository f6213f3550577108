"""The durations of rounds are learnt in parts, and parts that were never measured are estimated."""

from __future__ import annotations

import pytest

from outrider.services.target.policy.cost_model import DraftPath, StepCosts
from outrider.services.target.policy.estimate import FEW_SAMPLES
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CHAIN, LONG, TREE = DraftShape(3, 1, 4), DraftShape(6, 1, 7), DraftShape(3, 4, 16)
DEVICE, HOST = DraftPath.DEVICE, DraftPath.HOST


def test_plain_passes_are_interpolated_between_batch_sizes() -> None:
    costs = StepCosts()
    assert costs.plain(1) is None
    costs.observe_verify(1, 1, 0.004)
    assert costs.plain(3) == 0.004
    costs.observe_verify(5, 5, 0.006)
    assert costs.plain(3) == pytest.approx(0.005)
    assert costs.plain(9) == 0.006
    assert costs.knows_plain(1)
    assert not costs.knows_plain(9)


def test_without_a_plain_pass_the_shortest_pass_stands_for_it() -> None:
    costs = StepCosts()
    costs.observe_verify(4, 20, 0.006)
    costs.observe_verify(4, 40, 0.009)
    assert costs.plain(4) == 0.006
    assert not costs.knows_plain(4)
    assert not costs.measured_plain
    costs.observe_verify(1, 1, 0.007)
    assert costs.plain(4) == 0.007
    assert costs.measured_plain


def test_verify_passes_are_interpolated_and_extrapolated() -> None:
    costs = StepCosts()
    costs.observe_verify(1, 1, 0.004)
    assert 0.004 < costs.verify(1, 16) < 0.01, "rows must cost something before any is measured"
    costs.observe_verify(1, 17, 0.008)
    assert costs.verify(1, 9) == pytest.approx(0.006)
    assert costs.verify(1, 33) == pytest.approx(0.012)
    assert costs.most_rows(1) == 17


def test_drafts_are_scaled_to_other_depths_and_numbers_of_sequences() -> None:
    costs = StepCosts()
    costs.observe_verify(1, 1, 0.004)
    assert 0 < costs.draft(CHAIN, 1) < costs.draft(LONG, 1)
    costs.observe_drafts({CHAIN: 1}, DEVICE, 0.0009)
    assert costs.draft(CHAIN, 8) == pytest.approx(0.0009)
    assert 0.0009 < costs.draft(LONG, 1) < 0.0018
    costs.observe_drafts({LONG: 8}, DEVICE, 0.003)
    assert costs.draft(CHAIN, 8) == pytest.approx(0.0009), "a measured shape is not scaled"


def test_several_shapes_add_up_on_the_device_and_not_on_the_host() -> None:
    costs = StepCosts()
    costs.observe_verify(4, 4, 0.004)
    costs.observe_verify(4, 28, 0.005)
    costs.observe_drafts({CHAIN: 2}, DEVICE, 0.001)
    costs.observe_drafts({TREE: 2}, DEVICE, 0.002)
    both = {CHAIN: 2, TREE: 2}
    assert costs.round(4, 28, both, DEVICE) == pytest.approx(0.008)
    assert costs.round(4, 28, both, HOST) == pytest.approx(0.007)
    costs.observe_drafts(both, DEVICE, 0.003)
    assert costs.draft(TREE, 2) == pytest.approx(0.002), "each gets its expected share"


def test_a_single_slow_draft_hardly_counts() -> None:
    costs = StepCosts()
    for seconds in (0.001, 0.001, 0.05, 0.001):
        costs.observe_drafts({CHAIN: 1}, DEVICE, seconds)
    assert costs.draft(CHAIN, 1) < 0.0012


def test_the_rest_of_a_round_is_learnt_apart_for_drafts() -> None:
    costs = StepCosts()
    costs.observe_verify(1, 1, 0.004)
    costs.observe_rest(1, False, 0.0005)
    assert costs.round(1, 1, {}, DEVICE) == pytest.approx(0.0045)
    costs.observe_drafts({CHAIN: 1}, DEVICE, 0.001)
    costs.observe_rest(1, True, 0.0)
    assert costs.round(1, 1, {CHAIN: 1}, DEVICE) == pytest.approx(0.005)


def test_a_single_slow_plain_pass_does_not_make_drafts_look_cheap() -> None:
    """Sequences that draft never measure the plain pass again, so the wrong estimate would last."""
    costs = StepCosts()
    costs.observe_verify(16, 16, 0.035)
    costs.observe_verify(16, 32, 0.0045)
    costs.observe_verify(64, 64, 0.005)
    assert costs.plain(16) == 0.0045, "a pass over more rows takes at least as long"
    assert costs.plain(20) <= 0.005
    assert costs.doubts(16, 16, NO_DRAFT), "so plain decoding is measured again soon"
    for _ in range(FEW_SAMPLES):
        costs.observe_verify(16, 16, 0.0042)
    assert costs.plain(16) == 0.0042
    assert not costs.doubts(16, 16, NO_DRAFT)


def test_a_prompt_before_the_first_round_with_drafts_does_not_count_as_its_cost() -> None:
    costs = StepCosts()
    for _ in range(FEW_SAMPLES):
        costs.observe_rest(8, False, 0.0001)
    costs.observe_rest(8, True, 0.15)
    assert costs.rest(8, True) == 0.0001
    for _ in range(FEW_SAMPLES):
        costs.observe_rest(8, True, 0.002)
    assert costs.rest(8, True) == 0.002


def test_a_draft_for_more_sequences_limits_an_unsure_estimate() -> None:
    costs = StepCosts()
    costs.observe_drafts({CHAIN: 4}, DEVICE, 0.03)
    costs.observe_drafts({CHAIN: 64}, DEVICE, 0.0015)
    assert costs.draft(CHAIN, 4) == pytest.approx(0.0015)
