"""Rounds on the draft's device for a remote target: sessions that may join, and the cost of failed rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.drafts.slotted_target import (
    COLUMNS,
    PROMPT,
    ROWS,
    VOCAB,
    Target,
    check_many_rounds,
    host_tree,
    told,
)
from support.models.toys import make_toy_pair

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.peers import peer_slots
from outrider.services.draft.peers.peer_slots import PeerSlots
from outrider.services.draft.peers.replies import ExchangeEnded, NeedResync, Rejected, SlotReady
from outrider.services.draft.settings import DraftSettings
from outrider.shared.spec.tree import DraftShape

CPU = torch.device("cpu")
SHAPE, OTHER_SHAPE = DraftShape(3, 2, 8), DraftShape(2, 1, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> DraftEngine:
    values = {
        "draft": pair[1],
        "target_weights": pair[0],
        "device": "cpu",
        "kv_tokens": 256,
        "page_size": 16,
        "max_steps": 8,
    }
    return build_engine(DraftSettings.load(values), CPU, torch.float32)


@pytest.fixture
def all_slots(engine: DraftEngine) -> PeerSlots:
    return PeerSlots(engine, CPU)


@pytest.fixture
def target(engine: DraftEngine, all_slots: PeerSlots) -> Target:
    made = Target(engine, all_slots)
    assert made.open_slots() == ""
    return made


def test_groups_of_several_shapes_draft_together_while_sessions_join_and_leave(
    engine: DraftEngine, target: Target
) -> None:
    shapes = (SHAPE, OTHER_SHAPE)
    for session_id in (7, 8):
        target.follow(session_id)
    assert [reply for reply in target.replies if isinstance(reply, SlotReady)] == [
        SlotReady(7, 1),
        SlotReady(8, 1),
    ]
    # 1. Both join.
    target.choose(7, 11)
    target.choose(8, 12)
    both = [(SHAPE, {3: (7, 1)}), (OTHER_SHAPE, {0: (8, 1)})]
    assert target.round(2, both, joins={3: 7, 0: 8}) == ""
    expected = [host_tree(engine, target.tokens[7], SHAPE), host_tree(engine, target.tokens[8], OTHER_SHAPE)]
    assert [group[0] for group in target.trees(shapes)] == expected
    assert not any(group[1] for group in target.trees(shapes)), "the second rows are idle"
    # 2. One leaves, and gets its later tokens in a commit.
    news = [told(3, 0, 8, 11), told(0, 0, 8, 12), told(3, 2, 9, 21, 22), told(0, 2, 9, 31)]
    target.choose(7, 21, 22)
    target.choose(8, 31)
    assert target.round(3, [(SHAPE, {3: (7, 2)})], told=news, left=[0]) == ""
    assert target.trees([SHAPE])[0][0] == host_tree(engine, target.tokens[7], SHAPE)
    target.choose(8, 32, 33)
    target.commit(8, 9)
    # 3. It joins again, with the other shape, in another slot.
    target.choose(7, 23)
    news = [told(3, 3, 11, 23)]
    assert target.round(4, [(SHAPE, {3: (7, 1), 1: (8, 2)})], told=news, joins={1: 8}) == ""
    assert target.trees([SHAPE])[0] == [host_tree(engine, target.tokens[one], SHAPE) for one in (7, 8)]
    assert target.tried == [False, False, True]
    engine.sessions.check()


def test_a_round_without_its_state_drafts_nothing(target: Target) -> None:
    target.follow(7)
    target.choose(7, 11)
    target.round(2, [(SHAPE, {0: (7, 1)}), (OTHER_SHAPE, {})], joins={0: 7})
    assert target.trees([SHAPE, OTHER_SHAPE])[0][0]
    target.arrives = False
    target.round(3, [(SHAPE, {0: (7, 1)}), (OTHER_SHAPE, {})])
    assert not target.trees([SHAPE, OTHER_SHAPE])[0][0]
    assert target.tried == [False, True]


@pytest.mark.parametrize(
    "lie",
    [
        told(0, 9, 9, 11),  # a round that has not run
        told(0, 2, 8, 11),  # tokens that the draft knows
        told(0, 2, 10, 11),  # a gap
        told(0, 2, 9, VOCAB),  # an unknown token
        told(0, 2, 9, *([1] * 5000)),  # too long
    ],
)
def test_a_report_that_does_not_fit_its_session_costs_this_session(
    engine: DraftEngine, target: Target, lie: draft_pb2.SlotTokens
) -> None:
    for session_id in (7, 8):
        target.follow(session_id)
        target.choose(session_id, 11)
    target.round(2, [(SHAPE, {0: (7, 1), 1: (8, 1)})], joins={0: 7, 1: 8})
    news = [told(0, 0, 8, 11), told(1, 0, 8, 11), lie, told(1, 2, 9, 12)]
    target.choose(8, 12)
    assert target.round(3, [(SHAPE, {0: (7, 1), 1: (8, 1)})], told=news) == ""
    assert NeedResync(7, 1, "rounds") in target.replies
    assert engine.sessions.get(target.peer.id, 7) is None
    mine, its = target.trees([SHAPE])[0]
    assert not mine
    assert its == host_tree(engine, target.tokens[8], SHAPE)


def test_a_session_that_lacks_rows_may_not_join(engine: DraftEngine, target: Target) -> None:
    target.follow(7, rows=ROWS - 1)
    assert not target.replies
    assert target.round(2, [(SHAPE, {0: (7, 1)})], joins={0: 7}) == ""
    assert target.replies == [NeedResync(7, 1, "rounds")]
    assert target.round(3, [(SHAPE, {0: (7, 1)})], joins={0: 7}) == ""
    assert target.replies[1:] == [NeedResync(7, 1, "unknown_session")]
    assert not target.trees([SHAPE])[0][0]


def test_a_session_without_memory_is_rejected_and_the_others_draft(
    engine: DraftEngine, target: Target
) -> None:
    for session_id in (7, 8):
        target.follow(session_id)
        target.choose(session_id, 11)
    pool = engine.strategy._pool  # type: ignore[attr-defined]
    target.round(2, [(SHAPE, {0: (7, 1)})], joins={0: 7})
    with pool.allocator.allocate(pool.allocator.free_pages):
        assert target.round(3, [(SHAPE, {0: (7, 1), 1: (8, 1)})], joins={1: 8}) == ""
    (rejected,) = (reply for reply in target.replies if isinstance(reply, Rejected))
    assert (rejected.session_id, rejected.reason) == (8, "kv_full")
    mine, its = target.trees([SHAPE])[0]
    assert mine == host_tree(engine, target.tokens[7], SHAPE)
    assert not its


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 5},
        {"batch": 0},
        {"columns": 2},
        {"columns": 65},
        {"slots": [4]},
        {"slots": [0, 0]},
        {"shape": draft_pb2.Shape(depth=0, topk=1, max_nodes=1)},
        {"shape": draft_pb2.Shape(depth=9, topk=2, max_nodes=8)},
        {"shape": draft_pb2.Shape(depth=3, topk=2, max_nodes=1 << 31)},
        {"committed_upper": []},
    ],
)
def test_rounds_of_impossible_sizes_are_refused(target: Target, changes: dict[str, object]) -> None:
    target.follow(7)
    fields = {
        "shape": draft_pb2.Shape(depth=3, topk=2, max_nodes=8),
        "batch": 2,
        "columns": COLUMNS,
        "slots": [0],
        "committed_upper": [9],
    }
    fields |= changes
    if len(fields["slots"]) == 2:  # type: ignore[arg-type]
        fields["committed_upper"] = [9, 9]
    message = draft_pb2.RoundsNext(rounds=1, number=2, groups=[draft_pb2.SlotGroup(**fields)])  # type: ignore[arg-type]
    message.joins.add(slot=0, session_id=7, epoch=1)
    assert target.peer_slots.run(target.peer, message, target) == "size"  # type: ignore[arg-type]
    assert target.peer_slots.peer is None
    assert not target.given


def test_a_broken_exchange_ends_the_series_and_a_new_one_begins_with_empty_slots(
    engine: DraftEngine, target: Target
) -> None:
    session = target.follow(7)
    target.choose(7, 11)
    target.round(2, [(SHAPE, {0: (7, 1)})], joins={0: 7})
    assert session.engaged
    target.broken = True
    assert target.round(3, [(SHAPE, {0: (7, 1)})]) == "late"
    assert target.round(4, [(SHAPE, {0: (7, 1)})]) == "late", "the series has ended"
    assert target.round(6, [(SHAPE, {0: (7, 1)})], series=5) == "mailbox"
    assert not session.engaged
    target.broken = False
    assert target.round(8, [(SHAPE, {0: (7, 1)})], series=7) == ""
    assert not target.trees([SHAPE])[0][0], "the slot is empty"
    assert target.round(9, [(SHAPE, {0: (7, 1)})], joins={0: 7}, series=7) == ""
    assert target.trees([SHAPE])[0][0] == host_tree(engine, target.tokens[7], SHAPE)


def test_another_target_ends_the_rounds_and_none_begin_while_it_has_sessions(
    engine: DraftEngine, target: Target
) -> None:
    target.follow(7)
    target.choose(7, 11)
    target.round(2, [(SHAPE, {0: (7, 1)})], joins={0: 7})
    assert target.peer_slots.peer is target.peer
    other = Target(engine, target.peer_slots, 2)
    assert other.open_slots() == ""
    target.peer_slots.make_way(other.peer)
    assert target.replies[-1] == ExchangeEnded(1, "busy")
    assert target.peer_slots.peer is None
    other.follow(7)
    for one in (target, other):
        assert one.round(4, [(SHAPE, {0: (7, 1)})], series=3) == "busy"
    engine.drop_peer(other.peer.id)
    assert target.round(6, [(SHAPE, {0: (7, 1)})], joins={0: 7}, series=5) == ""


def test_when_all_sessions_have_left_no_target_holds_the_device(engine: DraftEngine, target: Target) -> None:
    session = target.follow(7)
    target.choose(7, 11)
    target.round(2, [(SHAPE, {0: (7, 1)})], joins={0: 7})
    target.peer_slots.update(target.peer, draft_pb2.SlotsUpdate(rounds=1, told=[told(0, 0, 8, 11)], left=[0]))
    assert target.peer_slots.peer is None
    assert not session.engaged
    assert session.tokens == [*PROMPT, 11]


def test_sizes_beyond_the_limit_run_in_memory_of_their_own(
    engine: DraftEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_slots, "MAX_SIZES", 1)
    target.follow(7)
    target.choose(7, 11)
    target.round(2, [(SHAPE, {0: (7, 1)})], joins={0: 7})
    for number, shape in ((3, OTHER_SHAPE), (4, DraftShape(2, 2, 5)), (5, SHAPE)):
        assert target.round(number, [(shape, {0: (7, 1)})]) == ""
        assert target.trees([shape])[0][0] == host_tree(engine, target.tokens[7], shape)
    assert len(target.peer_slots._buffers) == 1


def test_rounds_whose_groups_change_every_time(engine: DraftEngine) -> None:
    check_many_rounds(engine, CPU, 8)
