"""The controller's decisions: when it looks, what it keeps, whom it lets draft, and why."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby

import pytest
from support.engine.auto_machine import CHAIN, CHAIN_3, TREE, CostlyRows, Machine, Server, law_of

from outrider.services.target.policy.acceptance import SamplingKind
from outrider.services.target.policy.controller import (
    ROUNDS_PER_CHOICE,
    EntryBound,
    ExecutedEntry,
    ExecutedStep,
    SpeculationController,
)
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.policy.look_options import LOOK_ENTRIES
from outrider.services.target.policy.offered_shapes import MOST_ROWS, offered_shapes
from outrider.services.target.policy.verdict import AutoReason
from outrider.services.target.policy.wait_cap import ANSWERS_TO_JUDGE
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

GOOD, USELESS = law_of(4.0), law_of(1.0)
MACHINE = Machine()


def server(controller: SpeculationController, batch_size: int = 4, **options: object) -> Server:
    given = {"new_tokens": 400, "laws": [GOOD], **options}
    return Server(controller, MACHINE, batch_size, **given)  # type: ignore[arg-type]


def used(rounds: list[list[DraftShape]]) -> Counter[DraftShape]:
    return Counter(shape for shapes in rounds for shape in shapes)


def test_nothing_is_assumed_of_a_drafter_that_was_not_measured() -> None:
    controller = SpeculationController()
    one = server(controller, 16)
    one.round()
    assert used(one.rounds) == {NO_DRAFT: 16}, "the plain cost is measured first"
    assert controller.verdict.reason is AutoReason.UNMEASURED
    while not controller._drafter.known:
        one.round()
    for shapes in one.rounds[:-1]:
        assert sum(shape.drafts for shape in shapes) <= LOOK_ENTRIES
    assert len(one.rounds) < 30
    one.run(300)
    assert controller.verdict.reason is AutoReason.PAYS


def test_a_new_request_starts_from_what_is_known() -> None:
    controller = SpeculationController()
    server(controller, laws=[GOOD]).run(3000)
    first = server(controller, laws=[GOOD])
    first.round()
    assert all(shape.drafts for shape in first.rounds[0])
    useless = SpeculationController()
    server(useless, laws=[USELESS]).run(3000)
    later = server(useless, 4, laws=[USELESS], new_tokens=256, seed=1)
    later.run(1000)
    assert used(later.rounds)[NO_DRAFT] > 0.95 * sum(used(later.rounds).values())


@pytest.mark.parametrize("known", [True, False])
def test_what_is_known_of_a_drafter_is_kept_for_its_return(known: bool) -> None:
    controller = SpeculationController()
    controller.adopt("head")
    server(controller, laws=[USELESS]).run(3000)
    controller.adopt("other")
    entry = EntryBound(controller.new_state(), TREE, 100, CHAIN)
    controller.choose([entry] * 4)
    assert controller.verdict.reason in (AutoReason.UNMEASURED, AutoReason.PROBING)
    controller.adopt("head" if known else "third")
    assert controller._drafter.known == known


def test_warm_up_teaches_costs_only() -> None:
    controller = SpeculationController()
    server(controller).run(1000)
    plain_s = controller.costs.plain(4)
    controller.forget_acceptance()
    assert controller.costs.plain(4) == plain_s
    assert not controller._drafter.known
    assert controller.verdict.reason is AutoReason.IDLE
    assert controller.speedup_estimate is None


def test_the_speedup_is_measured_and_estimated() -> None:
    controller = SpeculationController()
    server(controller, 1).run(3000)
    measured, estimated = controller.speedup_estimate, controller.verdict.speedup
    assert measured is not None
    assert estimated is not None
    assert 1.8 < measured < 4
    assert 1.8 < estimated < 4


def test_kinds_of_sampling_are_told_apart() -> None:
    controller = SpeculationController()
    kinds = [SamplingKind.GREEDY, SamplingKind.SAMPLED]
    one = server(controller, 16, laws=[GOOD, USELESS], kinds=kinds)
    one.run(8000)
    one.rounds.clear()
    by_kind: dict[SamplingKind, Counter[bool]] = {kind: Counter() for kind in kinds}
    for _ in range(200):
        live = list(one.live)
        one.round()
        for request, shape in zip(live, one.rounds[-1], strict=True):
            by_kind[request.state.acceptance.kind][shape.drafts] += 1
    greedy, sampled = by_kind[kinds[0]], by_kind[kinds[1]]
    assert greedy[True] > 0.8 * greedy.total()
    assert sampled[False] > 0.8 * sampled.total()


def test_requests_of_one_kind_are_told_apart_by_their_drafts() -> None:
    controller = SpeculationController()
    one = Server(controller, CostlyRows(), 16, 1500, [GOOD, USELESS])
    one.run(10_000)
    drafts: dict[bool, Counter[bool]] = {True: Counter(), False: Counter()}
    for _ in range(150):
        live = list(one.live)
        one.round()
        for request, shape in zip(live, one.rounds[-1], strict=True):
            drafts[request.law is GOOD][shape.drafts] += 1
    assert drafts[True][True] > 0.8 * drafts[True].total()
    assert drafts[False][True] < drafts[True][True] / 2


def test_a_round_has_few_shapes_that_have_graphs() -> None:
    controller = SpeculationController()
    one = server(controller, 32, laws=[law_of(1.2), law_of(2.5), GOOD])
    one.run(20_000)
    offered = offered_shapes((TREE, CHAIN), 1)
    for shapes in one.rounds:
        assert len(set(shapes) - {NO_DRAFT}) <= 3, "two shapes, and one that is looked at"
        assert set(shapes) <= {NO_DRAFT, *offered}
        assert sum(shape.max_nodes for shape in shapes) <= MOST_ROWS


def test_decisions_are_kept_for_some_rounds() -> None:
    controller = SpeculationController()
    one = server(controller, 1, new_tokens=4000)
    one.run(3000)
    lengths = [len(list(run)) for _, run in groupby(shapes[0] for shapes in one.rounds[40:])]
    assert min(lengths[1:-1], default=ROUNDS_PER_CHOICE) >= 4


def test_depth_is_bounded_by_the_tokens_left_to_emit() -> None:
    controller = SpeculationController()
    one = server(controller, 1)
    one.run(2000)
    state = one.live[0].state
    (shape,) = controller.choose([EntryBound(state, TREE, 2, CHAIN)], (), DraftPath.HOST)
    assert shape.depth <= 2
    assert controller.choose([EntryBound(state, TREE, 0, CHAIN)]) == [NO_DRAFT]
    assert controller.choose([]) == []


def test_entries_beside_entries_that_always_draft_draft_too() -> None:
    controller = SpeculationController()
    one = server(controller, 4, others=[TREE] * 4)
    one.run(4000)
    shapes = used(one.rounds[200:])
    assert shapes[NO_DRAFT] < 0.2 * shapes.total()


@pytest.mark.parametrize(("draft_scale", "pays"), [(0.02, True), (1.0, False)])
def test_one_entry_among_plain_entries_drafts_if_that_delays_the_others_little(
    draft_scale: float, pays: bool
) -> None:
    class Quick(Machine):
        def draft_s(self, shape: DraftShape, count: int) -> float:
            return draft_scale * super().draft_s(shape, count)

    controller = SpeculationController()
    one = Server(controller, Quick(), 1, 4000, [GOOD], others=[NO_DRAFT] * 31)
    one.run(900)
    shapes = used(one.rounds[100:])
    assert (shapes[NO_DRAFT] < 0.2 * shapes.total()) is pays
    assert (shapes[NO_DRAFT] > 0.8 * shapes.total()) is not pays


def test_a_draft_that_becomes_good_is_found_again() -> None:
    controller = SpeculationController()
    rng, quality = random.Random(0), [USELESS]
    one = server(controller, 1, laws=[lambda depth: quality[0](depth)], new_tokens=100_000)
    one.run(500 + rng.randrange(3))
    quality[0] = GOOD
    one.run(3000)
    one.rounds.clear()
    one.run(1000)
    assert used(one.rounds)[NO_DRAFT] < 0.2 * used(one.rounds).total()


def test_a_draft_that_becomes_useless_is_dropped() -> None:
    controller = SpeculationController()
    quality = [GOOD]
    one = server(controller, 4, laws=[lambda depth: quality[0](depth)])
    one.run(2000)
    quality[0] = USELESS
    one.run(1500)
    one.rounds.clear()
    one.run(1500)
    assert used(one.rounds)[NO_DRAFT] > 0.9 * used(one.rounds).total()
    assert controller.verdict.reason in (AutoReason.DOES_NOT_PAY, AutoReason.PROBING)


def test_the_verdict_counts_entries_and_says_why() -> None:
    controller = SpeculationController()
    one = server(controller, 8)
    one.run(4000)
    while controller.verdict.reason is not AutoReason.PAYS:
        one.round()
    verdict = controller.verdict
    assert sum(verdict.shapes.values()) + verdict.plain_rows == 8 == verdict.batch_size
    assert verdict.round_s is not None
    controller.draft_away(3, 5)
    verdict = controller.verdict
    assert (verdict.reason, verdict.plain_rows, verdict.batch_size) == (AutoReason.DRAFT_AWAY, 3, 5)


def test_prompts_are_fed_only_while_drafting_pays() -> None:
    for law, pays in ((GOOD, True), (USELESS, False)):
        controller = SpeculationController()
        entry = EntryBound(controller.new_state(), TREE, 100, CHAIN)
        assert not controller.would_draft(entry)
        server(controller, laws=[law]).run(3000)
        assert controller.would_draft(entry) is pays


def test_the_wait_cap_follows_the_measurements() -> None:
    controller = SpeculationController()
    entry = EntryBound(controller.new_state(), CHAIN_3, 100)
    assert controller.wait_cap_s([entry], 1) == pytest.approx(0.1), "nothing was measured yet"
    controller.costs.observe_verify(1, 1, 0.004)
    controller.costs.observe_verify(1, 4, 0.006)
    for _ in range(ANSWERS_TO_JUDGE):
        controller.costs.observe_answer(0.001)
    assert controller.wait_cap_s([entry], 1) == pytest.approx(0.002), "twice the 99th percentile"
    for _ in range(128):
        controller.costs.observe_answer(0.5)
    for _ in range(50):
        entry.state.acceptance.observe(True, 0, 3)
    controller._drafter.refresh()
    assert controller.wait_cap_s([entry], 1) == pytest.approx(0.006), "the time of 1.5 plain rounds"
    for _ in range(400):
        entry.state.acceptance.observe(True, 3, 3)
    controller._drafter.refresh()
    tokens = entry.state.acceptance.expected_tokens(True)[3]
    assert tokens > 3.5
    assert controller.wait_cap_s([entry], 1) == pytest.approx(1.5 * (tokens * 0.004 - 0.006)), (
        "1.5 times the time that the expected tokens save"
    )


def test_times_of_provisional_rounds_are_not_learned() -> None:
    """A round whose pieces are not recorded yet takes longer than later rounds of its kind."""
    controller = SpeculationController()
    state = controller.new_state()
    entries = [ExecutedEntry(state, 4, CHAIN_3, 3)]
    for _ in range(8):
        controller.observe(ExecutedStep(entries, {CHAIN_3: 1}, 0.01, 0.04, 0.05, provisional=True))
    assert controller.costs.plain(1) is None
    assert controller.speedup_estimate is None
    controller._drafter.refresh()
    assert state.acceptance.expected_tokens(True)[3] > 1, "accepted drafts do not depend on graphs"
