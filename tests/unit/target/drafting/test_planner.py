"""The shape of every entry: obstacles, choices of auto, planned shapes, and the limit of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.engine.slot_sequences import seated_sequence

from outrider.services.target.drafting.planner import DraftPlanner, bound_of
from outrider.services.target.policy.controller import EntryBound, SpeculationController
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.policy.verdict import AutoReason, AutoVerdict
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

TREE, CHAIN = DraftShape(3, 2, 7), DraftShape(2, 1, 3)


class Room:
    """A planner whose obstacles and choices the test supplies."""

    def __init__(self, max_rows: int = 1000, path: DraftPath = DraftPath.DEVICE) -> None:
        self.pool = KVPool(256, 4, 1, 1, 2, torch.float32, "cpu")
        self.obstacles: dict[int, str] = {}
        self.chosen: list[DraftShape] = []
        self.asked: list[tuple[DraftPath, int, list[DraftShape]]] = []
        self.away: list[tuple[int, int]] = []
        self.counted: list[str] = []
        # Seconds of a round, by nodes and depth. None: no plain round was measured.
        self.cost: Callable[[int, int], float] | None = None
        costs = mock.Mock(round=self._seconds)
        type(costs).measured_plain = property(lambda _costs: self.cost is not None)
        controller: Any = SimpleNamespace(
            choose=self._choose,
            draft_away=lambda entries, batch_size: self.away.append((entries, batch_size)),
            would_draft=lambda entry: entry.bound == CHAIN,
            costs=costs,
            verdict=AutoVerdict(AutoReason.PROBING),
        )
        sessions: Any = SimpleNamespace(obstacle=lambda one: self.obstacles.get(one.session_id, ""))
        metrics: Any = SimpleNamespace(fell_back=self.counted.append)
        self.planner = DraftPlanner(sessions, controller, metrics, max_rows)
        self.path = path

    def shapes(
        self,
        entries: list[Sequence],
        kept: list[DraftShape | None] | tuple[()] = (),
        *,
        requested: bool = False,
    ) -> list[DraftShape]:
        pairs = zip(entries, kept or [None] * len(entries), strict=True)
        self.planner.keep((entry, shape) for entry, shape in pairs if shape is not None)
        return self.planner.shapes(entries, self.path, requested=requested)

    def _choose(
        self, entries: list[EntryBound], others: list[DraftShape], path: DraftPath
    ) -> list[DraftShape]:
        self.asked.append((path, len(entries), others))
        return self.chosen[: len(entries)]

    def _seconds(
        self, batch_size: int, rows: int, groups: Mapping[DraftShape, int], path: DraftPath
    ) -> float:
        assert self.cost is not None
        return self.cost(rows, max((shape.depth for shape, count in groups.items() if count), default=0))

    def sequence(
        self, session_id: int, shape: DraftShape = TREE, *, auto: bool = False, follow: bool = True
    ) -> Sequence:
        made = seated_sequence(self.pool, session_id, session_id, shape=shape, follow=follow)
        if auto:
            made.controller_state = SpeculationController().new_state()
        return made


def test_every_entry_remembers_why_it_drafts_or_does_not() -> None:
    room = Room()
    on, auto, away = room.sequence(0), room.sequence(1, auto=True), room.sequence(2, auto=True)
    room.chosen = [CHAIN]
    room.obstacles[2] = "late"
    room.shapes([on, auto, away])
    assert [one.stats.reason for one in (on, auto, away)] == ["", "probing", "late"]
    # The next round begins anew.
    room.obstacles.clear()
    room.chosen = [CHAIN, CHAIN]
    room.shapes([on, auto, away])
    assert away.stats.reason == "probing"


def test_a_planned_entry_keeps_its_reason() -> None:
    room = Room()
    on, auto = room.sequence(0), room.sequence(1, auto=True)
    room.obstacles = {0: "draft_down", 1: "late"}
    shapes = room.shapes([on, auto])
    room.shapes([on, auto], shapes)
    assert [one.stats.reason for one in (on, auto)] == ["draft_down", "late"]


def test_an_entry_that_never_drafts_says_why() -> None:
    room = Room()
    off, alone = room.sequence(0, NO_DRAFT), room.sequence(1, follow=False)
    room.shapes([off, alone])
    assert [one.stats.reason for one in (off, alone)] == ["user", "no_draft"]


def test_each_mode_gets_its_shape() -> None:
    room = Room()
    on, off, auto = room.sequence(0), room.sequence(1, follow=False), room.sequence(2, auto=True)
    room.chosen = [CHAIN]
    assert room.shapes([on, off, auto]) == [TREE, NO_DRAFT, CHAIN]
    assert room.asked == [(DraftPath.DEVICE, 1, [TREE, NO_DRAFT])], "the shapes of the other entries"
    assert not room.counted


def test_rounds_through_the_host_choose_for_each_entry() -> None:
    room = Room(path=DraftPath.HOST)
    room.chosen = [CHAIN, NO_DRAFT]
    entries = [room.sequence(index, auto=True) for index in range(2)]
    assert room.shapes(entries) == [CHAIN, NO_DRAFT]
    assert room.asked == [(DraftPath.HOST, 2, [])]


def test_shapes_are_bounded_by_what_their_levels_can_hold() -> None:
    room = Room()
    wide = DraftShape(2, 1, 60)
    room.chosen = [wide]
    shapes = room.shapes([room.sequence(0, wide), room.sequence(1, wide, auto=True)])
    assert shapes == [wide.bounded(), wide.bounded()]
    assert shapes[0].max_nodes < 60


def test_an_entry_with_an_obstacle_counts_one_fallback_a_round() -> None:
    room = Room()
    entries = [room.sequence(0), room.sequence(1, auto=True), room.sequence(2, follow=False)]
    room.obstacles = {0: "draft_down", 1: "no_features", 2: "draft_down"}
    assert room.shapes(entries) == [NO_DRAFT] * 3
    assert room.counted == ["draft_down", "no_features"]
    assert not room.asked
    assert room.away == [(1, 3)], "no `auto` entry can draft"
    room.shapes(entries)
    assert room.counted == ["draft_down", "no_features"] * 2
    assert entries[0].stats.report(None, "").fallback_reason == "draft_down"


def test_a_planned_entry_is_not_chosen_again() -> None:
    room = Room()
    entries = [room.sequence(0, auto=True), room.sequence(1, auto=True), room.sequence(2)]
    room.chosen = [TREE]
    room.obstacles = {2: "draft_down"}
    assert room.shapes(entries, [CHAIN, None, NO_DRAFT]) == [CHAIN, TREE, NO_DRAFT]
    assert room.asked == [(DraftPath.DEVICE, 1, [CHAIN, NO_DRAFT])]
    assert not room.counted, "the fallback was counted when the entry was planned"
    assert room.shapes(entries, [CHAIN, CHAIN, NO_DRAFT]) == [CHAIN, CHAIN, NO_DRAFT]
    assert len(room.asked) == 1


def test_shapes_are_kept_for_a_single_round() -> None:
    room = Room()
    entries = [room.sequence(0, auto=True), room.sequence(1)]
    room.chosen = [TREE]
    room.planner.keep(zip(entries, [CHAIN, NO_DRAFT], strict=True))
    room.planner.forget(entries[1])
    assert room.planner.shapes(entries, room.path) == [CHAIN, TREE]
    assert room.planner.shapes(entries, room.path) == [TREE, TREE]


def test_nobody_joins_a_round_whose_trees_have_been_requested() -> None:
    room = Room()
    entries = [room.sequence(0), room.sequence(1, auto=True), room.sequence(2, follow=False)]
    assert room.shapes(entries, [CHAIN, None, None], requested=True) == [CHAIN, NO_DRAFT, NO_DRAFT]
    assert [one.stats.reason for one in entries] == ["", "joined", "no_draft"]
    assert not room.asked
    assert not room.counted
    assert room.shapes(entries[:1]) == [TREE], "the next round is open again"


def test_entries_of_auto_give_way_first() -> None:
    room = Room(max_rows=7 + 7 + 3)
    room.chosen = [CHAIN, CHAIN]
    entries = [room.sequence(0, auto=True), room.sequence(1), room.sequence(2, auto=True), room.sequence(3)]
    assert room.shapes(entries) == [NO_DRAFT, TREE, NO_DRAFT, TREE]
    assert room.counted == ["budget", "budget"]
    assert entries[0].stats.report(None, "").fallback_reason == "budget"


def test_no_more_entries_give_way_than_needed() -> None:
    room = Room(max_rows=7 + 3 + 1)
    room.chosen = [CHAIN, CHAIN]
    entries = [room.sequence(0), room.sequence(1, auto=True), room.sequence(2, auto=True)]
    assert room.shapes(entries) == [TREE, NO_DRAFT, CHAIN]
    assert room.counted == ["budget"]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_entries_of_mode_on_take_turns(count: int) -> None:
    room = Room(max_rows=2 * 7 + count - 2)
    entries = [room.sequence(index) for index in range(count)]
    drafted = [0] * count
    for _ in range(10 * count):
        shapes = room.shapes(entries)
        assert sum(shape.max_nodes for shape in shapes) <= 2 * 7 + count - 2
        assert sum(shape.drafts for shape in shapes) == 2
        for index, shape in enumerate(shapes):
            drafted[index] += shape.drafts
    assert drafted == [20] * count
    assert len(room.counted) == 10 * count * (count - 2)


def test_the_bound_of_an_auto_entry_ends_before_its_last_token() -> None:
    sequence = Room().sequence(0, auto=True)
    bound = bound_of(sequence)
    assert bound.state is sequence.controller_state
    assert bound.forms[0] == TREE
    assert bound.useful_depth == sequence.remaining - 1


def test_only_entries_that_will_draft_are_fed_with_prompts() -> None:
    room = Room()
    expects = room.planner.expects_drafts
    assert expects(room.sequence(0))
    assert not expects(room.sequence(1, follow=False))
    assert expects(room.sequence(2, CHAIN, auto=True))
    assert not expects(room.sequence(3, TREE, auto=True))


BIG = DraftShape(16, 16, 128)
"""A tree whose round takes three times as long as a plain round of eight rows, by `linear`."""


def linear(nodes: int, depth: int) -> float:
    return 0.006 + 0.0001 * nodes if depth == 0 else 0.008 + 0.0001 * nodes


def spent_s(room: Room, entries: list[Sequence], rounds: int) -> tuple[float, float, list[int]]:
    """Return the seconds of the rounds without and with fixed shapes, and each entry's number of trees."""
    base_s = total_s = 0.0
    drafted = [0] * len(entries)
    assert room.cost is not None
    for _round in range(rounds):
        shapes = room.shapes(entries)
        others = [
            shape if entry.controller_state is not None else NO_DRAFT
            for entry, shape in zip(entries, shapes, strict=True)
        ]
        for total, of in ((0, others), (1, shapes)):
            seconds = room.cost(sum(one.max_nodes for one in of), max(one.depth for one in of))
            base_s, total_s = (base_s, total_s + seconds) if total else (base_s + seconds, total_s)
        drafted = [count + shape.drafts for count, shape in zip(drafted, shapes, strict=True)]
    return base_s, total_s, drafted


@pytest.mark.parametrize("neighbours", ["plain", "auto"])
def test_large_fixed_shapes_at_most_double_the_rounds_of_others(neighbours: str) -> None:
    room = Room()
    room.cost = linear
    room.chosen = [CHAIN] * 4
    others = [
        room.sequence(index, auto=neighbours == "auto", follow=neighbours == "auto") for index in range(4)
    ]
    big = [room.sequence(4 + index, BIG) for index in range(4)]
    base_s, total_s, drafted = spent_s(room, others + big, 640)
    assert total_s <= 2.01 * base_s
    assert total_s > 1.5 * base_s, "what is allowed is used"
    turns = drafted[4:]
    assert min(turns) > 0
    assert max(turns) - min(turns) <= 16, "the entries take turns"
    assert set(room.counted) == {"budget"}
    if neighbours == "auto":
        assert drafted[:4] == [640] * 4


def test_a_single_tree_that_is_too_large_has_its_turn_now_and_then() -> None:
    room = Room()
    room.cost = lambda nodes, depth: 0.001 if depth == 0 else 0.006
    entries = [room.sequence(0, follow=False), room.sequence(1, BIG)]
    base_s, total_s, drafted = spent_s(room, entries, 640)
    assert total_s <= 2.1 * base_s
    assert drafted[1] > 640 / 8


def test_small_trees_beside_others_are_not_bounded() -> None:
    room = Room()
    room.cost = linear
    entries = [room.sequence(0, follow=False), *(room.sequence(1 + index) for index in range(5))]
    assert spent_s(room, entries, 50)[2] == [0] + [50] * 5
    assert not room.counted


def test_equal_fixed_shapes_do_not_bound_each_other_but_larger_ones_are_bounded() -> None:
    room = Room()
    room.cost = linear
    assert spent_s(room, [room.sequence(index, BIG) for index in range(6)], 20)[2] == [20] * 6
    entries = [room.sequence(0, CHAIN), *(room.sequence(1 + index, BIG) for index in range(4))]
    drafted = spent_s(room, entries, 400)[2]
    assert drafted[0] == 400
    assert all(0 < count < 300 for count in drafted[1:])


def test_nothing_is_bounded_before_a_plain_round_was_measured() -> None:
    room = Room()
    entries = [room.sequence(0, follow=False), *(room.sequence(1 + index, BIG) for index in range(4))]
    assert [shape.drafts for shape in room.shapes(entries)] == [False] + [True] * 4
    room.cost = linear
    assert sum(shape.drafts for shape in room.shapes(entries)) < 4


def test_a_round_that_is_planned_again_is_bounded_once() -> None:
    room = Room()
    room.cost = linear
    entries = [room.sequence(0, follow=False), *(room.sequence(1 + index, BIG) for index in range(4))]
    shapes = room.shapes(entries)
    counted = len(room.counted)
    assert room.shapes(entries, list(shapes)) == shapes
    assert len(room.counted) == counted > 0
