"""What is learnt of a drafter and of a request, and how the two are combined."""

from __future__ import annotations

import pytest

from outrider.services.target.policy.acceptance import (
    PRIOR_ACCEPTANCE,
    DrafterAcceptance,
    SamplingKind,
    SequenceAcceptance,
)
from outrider.shared.base.generation import SamplingParams

GREEDY, SAMPLED = SamplingKind.GREEDY, SamplingKind.SAMPLED


def learn(
    drafter: DrafterAcceptance,
    rounds: list[tuple[int, int]],
    *,
    times: int = 1,
    kind: SamplingKind = GREEDY,
    chain: bool = True,
) -> None:
    """Observe rounds, each as (accepted, offered depth)."""
    for _ in range(times):
        for accepted, depth in rounds:
            drafter.observe(kind, chain, accepted, depth)
    drafter.refresh()


def test_kinds_of_sampling() -> None:
    assert SamplingKind.of(SamplingParams(temperature=0.0, top_k=5)) is GREEDY
    assert SamplingKind.of(SamplingParams(temperature=0.7)) is SAMPLED
    for filtered in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingKind.of(SamplingParams(**filtered)) is SamplingKind.FILTERED  # type: ignore[arg-type]


def test_rates_are_per_position() -> None:
    drafter = DrafterAcceptance()
    assert drafter.rates(GREEDY, True)[0] == PRIOR_ACCEPTANCE
    learn(drafter, [(2, 3)], times=400)
    first, second, third, deeper = drafter.rates(GREEDY, True)[:4]
    assert min(first, second) > 0.95
    assert third < 0.05
    assert deeper < 0.35, "an unmeasured depth is like the one before it"
    assert drafter.expected_tokens(GREEDY, True)[:4] == pytest.approx([1, 2, 3, 3], abs=0.1)


def test_acceptance_is_known_after_some_rounds() -> None:
    drafter = DrafterAcceptance()
    learn(drafter, [(0, 1)], times=9)
    assert not drafter.known
    learn(drafter, [(0, 1)], times=2)
    assert drafter.known


def test_a_few_accepted_drafts_are_enough_to_know_that_a_drafter_works() -> None:
    drafter = DrafterAcceptance()
    learn(drafter, [(1, 1)], times=2)
    assert not drafter.known
    learn(drafter, [(1, 1)], times=1)
    assert drafter.known


def test_another_kind_and_form_start_from_what_is_known() -> None:
    drafter = DrafterAcceptance()
    learn(drafter, [(0, 3)], times=200)
    assert drafter.rates(SAMPLED, True)[0] < 0.05
    assert drafter.rates(GREEDY, False)[0] < 0.05
    learn(drafter, [(3, 3)], times=100, kind=SAMPLED)
    assert drafter.rates(SAMPLED, True)[0] > 0.8
    assert drafter.rates(GREEDY, True)[0] < 0.1


def test_what_is_not_in_use_fades() -> None:
    drafter = DrafterAcceptance()
    learn(drafter, [(0, 3)], chain=False, times=100)
    before = drafter.rates(GREEDY, False)[0]
    for _ in range(400):
        learn(drafter, [(3, 3)])
    assert before < 0.1
    assert drafter.rates(GREEDY, False)[0] > 0.7, "the other form is worth another try"
    for _ in range(400):
        learn(drafter, [(0, 3)], kind=SAMPLED)
    assert drafter.rates(GREEDY, True)[0] > 0.8, "a kind without requests does not fade"


def test_a_request_shifts_the_rates_of_its_drafter() -> None:
    drafter = DrafterAcceptance()
    learn(drafter, [(0, 3), (3, 3)], times=200)
    good, usual, bad = (SequenceAcceptance(drafter, GREEDY) for _ in range(3))
    for _ in range(20):
        good.observe(True, 3, 3)
        bad.observe(True, 0, 3)
    drafter.refresh()
    assert (bad.level, usual.level) < (usual.level, good.level)
    assert usual.level == 0
    worst, middle, best = (one.expected_tokens(True)[3] for one in (bad, usual, good))
    assert worst < 0.7 * middle
    assert best > 1.2 * middle


def test_a_request_starts_again_with_another_drafter() -> None:
    drafter, other = DrafterAcceptance(), DrafterAcceptance()
    sequence = SequenceAcceptance(drafter, GREEDY)
    for _ in range(20):
        sequence.observe(True, 0, 3)
    assert sequence.level < 0
    sequence.follow(drafter)
    assert sequence.level < 0
    sequence.follow(other)
    assert sequence.level == 0
    sequence.observe(True, 3, 3)
    other.refresh()
    assert other.rates(GREEDY, True)[0] > PRIOR_ACCEPTANCE
