"""`auto` on synthetic machines, in simulated time: never slower than plain decoding, and close to the best.

All forms have the same acceptance at each position. Requests come and go. The fixed choices serve the same
requests on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
from support.engine.auto_machine import CHAIN_3, CHAIN_5, TREE, CostlyRows, Machine, Server, law_of
from support.suite.cases import every_pair

from outrider.services.target.policy.acceptance import SamplingKind
from outrider.services.target.policy.controller import (
    EntryBound,
    ExecutedStep,
    SequenceState,
    SpeculationController,
)
from outrider.services.target.policy.cost_model import DraftPath
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

BATCHES, LENGTHS = (1, 4, 16, 64), (256, 1500)
MACHINE = Machine()


class Fixed:
    """Gives all entries one shape."""

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape
        self.other = SpeculationController()

    def new_state(self, kind: SamplingKind) -> SequenceState:
        return self.other.new_state(kind)

    def would_draft(self, entry: EntryBound) -> bool:
        return self.shape.drafts

    def choose(
        self, entries: Sequence[EntryBound], others: Sequence[DraftShape], path: DraftPath
    ) -> list[DraftShape]:
        return [self.shape] * len(entries)

    def observe(self, step: ExecutedStep) -> float:
        """Learn nothing."""
        return 0.0


def tokens_for(batch_size: int, accept_length: float) -> int:
    """Return how many tokens are served to measure a speed. Chance must not matter."""
    return int(6_000 * accept_length) + 900 * batch_size


@lru_cache
def best_fixed(accept_length: float, batch_size: int, new_tokens: int) -> float:
    """Return the tokens per second of the best of plain decoding, chains of 3 and 5, and the tree."""
    rates = []
    for shape in (NO_DRAFT, CHAIN_3, CHAIN_5, TREE):
        # The expected rate tells which shapes cannot be the best, and saves time.
        law = law_of(accept_length)
        if MACHINE.rate(shape, batch_size, law) > 0.95 * MACHINE.best_rate(batch_size, law):
            fixed: SpeculationController = Fixed(shape)  # type: ignore[assignment]
            server = Server(fixed, MACHINE, batch_size, new_tokens, [law], seed=9)
            server.run(batch_size * min(new_tokens, 300))
            rates.append(server.run(tokens_for(batch_size, accept_length)))
    return max(rates)


@pytest.mark.parametrize(
    ("accept_length", "batch_size", "new_tokens"), every_pair([1.2, 2.5, 4.0], BATCHES, LENGTHS)
)
def test_auto_is_close_to_the_best(accept_length: float, batch_size: int, new_tokens: int) -> None:
    server = Server(SpeculationController(), MACHINE, batch_size, new_tokens, [law_of(accept_length)], seed=3)
    server.run(3000 + batch_size * 256)
    rate = server.run(tokens_for(batch_size, accept_length))
    assert rate >= 0.97 * best_fixed(accept_length, batch_size, new_tokens)


@pytest.mark.parametrize("new_tokens", LENGTHS)
@pytest.mark.parametrize("batch_size", BATCHES)
def test_a_head_that_is_never_right_costs_next_to_nothing(batch_size: int, new_tokens: int) -> None:
    """The first requests of the server, during which the drafter is still unknown, count too."""
    controller = SpeculationController()
    server = Server(controller, MACHINE, batch_size, new_tokens, [law_of(1.0)])
    rate = server.run(batch_size * new_tokens)
    plain = MACHINE.rate(NO_DRAFT, batch_size, law_of(1.0))
    assert rate >= 0.985 * plain
    later = server.run(3000 + batch_size * 100)
    assert later >= 0.99 * plain
    assert controller.lost_s < 0.01 * server.seconds


@pytest.mark.parametrize("prompt", [2000, 8000])
def test_catching_up_on_long_prompts_counts_as_looking(prompt: int) -> None:
    server = Server(SpeculationController(), MACHINE, 4, 256, [law_of(1.0)], prompt=prompt)
    server.run(2000)
    rate = server.run(12_000)
    assert rate >= 0.985 * MACHINE.rate(NO_DRAFT, 4, law_of(1.0))


def test_a_slower_machine_needs_no_other_constants() -> None:
    slow = Machine(scale=5.0)
    useless = Server(SpeculationController(), slow, 4, 256, [law_of(1.0)])
    assert useless.run(6000) >= 0.985 * slow.rate(NO_DRAFT, 4, law_of(1.0))
    good = Server(SpeculationController(), slow, 4, 1500, [law_of(2.5)])
    good.run(3000)
    assert good.run(9000) >= 0.97 * slow.best_rate(4, law_of(2.5))


def test_a_mixture_of_requests_is_faster_than_any_shape_for_all() -> None:
    """Rows cost much here, so that useless drafts of some sequences delay the others."""

    laws, costly, new_tokens = [law_of(4.0), law_of(1.0)], CostlyRows(), 1500
    rates = []
    for shape in (NO_DRAFT, CHAIN_3, CHAIN_5):
        fixed: SpeculationController = Fixed(shape)  # type: ignore[assignment]
        server = Server(fixed, costly, 16, new_tokens, laws)
        server.run(12_000)
        rates.append(server.run(20_000))
    server = Server(SpeculationController(), costly, 16, new_tokens, laws)
    server.run(12_000)
    assert server.run(20_000) > 1.03 * max(rates)
