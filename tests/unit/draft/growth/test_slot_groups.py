"""Rounds on the device draft the same trees as rounds through the host, whoever drafts in which round.

The tests cover recurrent heads, MTP layers and a standalone draft model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.drafts.drafter_rig import (
    Rig,
    assert_same_trees,
    check_mixture,
    device_round,
    host_round,
    open_streams,
)
from support.engine.played_graphs import PlayedGraphs
from support.models import toy_mtp
from support.models.toy_heads import HIDDEN, VOCAB, base_config, eagle_tensors, write_head
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.build import build_engine
from outrider.services.draft.growth.draft_graph import DeviceGrowth, DraftGraph
from outrider.services.draft.growth.extend_graph import ExtendGraph
from outrider.services.draft.growth.page_tables import PageTable
from outrider.services.draft.inproc import HOST_PEER, InprocDrafter
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.strategies.paged import PagedStrategy
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.pages import PageAllocator
from outrider.shared.spec.tree import DraftShape

CPU = torch.device("cpu")
SHAPES = [
    DraftShape(5, 8, 32),
    DraftShape(3, 1, 4),
    DraftShape(1, 4, 3),
    DraftShape(4, 3, 9),
    DraftShape(2, 2, 40),
]

MTP_LAYERS = (1, 2, 4)
ONE_STAGE = ["EAGLE3", "EAGLE", "STANDALONE", "MTP 1"]

MakeRig = Callable[[], Rig]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    target = make_toy_target(folder / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    config = base_config() | {"bias": True}
    return {
        "target": target,
        "EAGLE3": make_toy_eagle3(folder / "eagle3", target, draft_vocab_size=24),
        "EAGLE": write_head(folder / "eagle", config, eagle_tensors()),
        "STANDALONE": make_toy_target(
            folder / "small", vocab_size=VOCAB, hidden_size=24, num_layers=2, head_dim=8, seed=4
        ),
        **{f"MTP {n}": toy_mtp.save(toy_mtp.sharp_model(n), folder / f"mtp{n}") for n in MTP_LAYERS},
    }


def rig_of(kind: str, folders: dict[str, Path]) -> Rig:
    """Make a drafter of one kind with a small cache. A number after the kind is that of the MTP layers."""
    algorithm = kind.split()[0]
    given = {"draft": folders[kind], "target_weights": folders["target"]}
    if algorithm == "MTP":
        given = {"target_weights": folders[kind]}
    settings = DraftSettings.load(
        {
            **given,
            "speculative_algorithm": algorithm,
            "device": "cpu",
            "kv_tokens": 4096,
            "page_size": 4,
        }
    )
    engine = build_engine(settings, CPU, torch.float32)
    spec = engine.strategy.feature_spec(None)
    drafter = InprocDrafter(engine, spec, CPU)
    assert drafter.on_device is drafter
    return Rig(drafter, spec.feature_size, CPU, engine.strategy.info.vocab_size, GraphCache(CPU))


@pytest.fixture(params=[*ONE_STAGE, "MTP 2", "MTP 4"])
def make_rig(request: pytest.FixtureRequest, folders: dict[str, Path]) -> MakeRig:
    return lambda: rig_of(request.param, folders)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_mixture_of_rounds_drafts_the_same(make_rig: MakeRig, shape: DraftShape) -> None:
    check_mixture(make_rig(), make_rig(), shape)


def test_ended_sequences_leave_the_others_alone(make_rig: MakeRig) -> None:
    shape = DraftShape(3, 4, 12)
    plain, mixed = make_rig(), make_rig()
    streams, twins = open_streams(plain, mixed, on_device=[mixed])
    source = random.Random(4)
    for ending in (1, 3, None):
        device_round(plain, streams, mixed, twins, [shape] * len(twins), source, ahead=True)
        gone = next((row for row, twin in enumerate(twins) if twin.session_id == ending), None)
        if gone is not None:  # the round in flight still drafts for this sequence
            mixed.end(twins.pop(gone))
            plain.end(streams.pop(gone))
    device_round(plain, streams, mixed, twins, [shape] * len(twins), source, ahead=True)
    assert [twin.session_id for twin in twins] == [2, 4]
    for rig in (plain, mixed):
        for stream in list(rig.streams):
            rig.end(stream)
        rig.drafter.shutdown()


def test_sequences_without_room_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    streams = open_streams(rig, on_device=[rig])[0]
    shape = DraftShape(3, 2, 6)
    rig.supply(streams)
    ids = [stream.session_id for stream in streams]
    upper = [len(stream.tokens) for stream in streams]
    assert list(rig.drafter.seat([*ids, 99], [*upper, 5], shape, 8, 4).refused) == [4], "unknown"
    upper[1] = 5000  # the pool holds 4096 tokens
    seated = rig.drafter.seat(ids, upper, shape, 4, 4)
    assert list(seated.refused) == [1]
    rows = rig.rows(4, 4)
    for row in (0, 2, 3):
        rig.fill(rows, row, streams[row])
    seated.load()
    assert seated.draft(rows).num_nodes.tolist() == [6, 1, 6, 6]
    assert rig.drafter.lacking(99) is None
    rig.drafter.shutdown()


def test_sessions_within_rounds_are_not_evicted(make_rig: MakeRig) -> None:
    rig = make_rig()
    streams = open_streams(rig, on_device=[rig])[0]
    rig.launch(streams[:2], DraftShape(3, 2, 6), 2, 4)
    table = rig.drafter._engine.sessions
    for _ in range(4):
        table.evict_idle(1e12)
    assert sorted(session.session_id for session in table) == [1, 2]
    rig.drafter.shutdown()


def test_graphs_are_recorded_with_idle_rows_that_touch_no_memory(make_rig: MakeRig) -> None:
    rig = make_rig()
    streams = open_streams(rig, on_device=[rig])[0]
    shape = DraftShape(4, 3, 16).bounded()
    pool = rig.drafter._engine.strategy._pool  # type: ignore[attr-defined]
    before = [plane.clone() for plane in pool.planes()]
    idle = rig.drafter.seat((), (), shape, 4, 5)
    trees = idle.draft(rig.rows(4, 5))
    assert trees.num_nodes.tolist() == [1] * 4
    assert trees.tokens[:, 0].tolist() == [0] * 4
    assert all(torch.equal(plane, was) for plane, was in zip(pool.planes(), before, strict=True))
    _, seated = rig.launch(streams, shape, 4, 5)
    assert seated.key == idle.key, "recorded graphs must stay valid"
    assert any(not torch.equal(plane, was) for plane, was in zip(pool.planes(), before, strict=True))
    rig.drafter.shutdown()


def test_rounds_that_the_host_starts_draft_the_same(make_rig: MakeRig) -> None:
    """Covers the GPU's path of one launch per round, with prompts of more rows than one round can add."""
    plain, rig = make_rig(), make_rig()
    strategy = rig.drafter._engine.strategy
    assert strategy.growth is not None
    assert strategy.growth.host is None
    host = DraftGraph(strategy.growth.memory, GraphCache(CPU), rig.feature_size, torch.float32)
    strategy.growth = DeviceGrowth(strategy.growth.memory, host)
    streams, twins = open_streams(plain, rig)
    source = random.Random(2)
    recorded = [rig.drafter.seat((), (), SHAPES[0], bs, 6).key for bs in (1, 2, 4, 8)]
    for shape in (*SHAPES, DraftShape(3, 2, 2), SHAPES[0]):
        for _ in range(2):
            host_round(plain, streams, rig, twins, shape, source)
    want, have = plain.propose(streams, SHAPES[3]), rig.propose(twins, SHAPES[3])
    again = rig.propose(twins, SHAPES[3])  # no row is fresh: the trees grow from the stored states
    for row in range(len(streams)):
        assert_same_trees(have, row, want, row)
        assert_same_trees(again, row, want, row)
    assert [rig.drafter.seat((), (), SHAPES[0], bs, 6).key for bs in (1, 2, 4, 8)] == recorded, (
        "recorded graphs must stay valid"
    )
    for drafter in (plain.drafter, rig.drafter):
        drafter.shutdown()


@pytest.mark.parametrize("make_rig", ONE_STAGE, indirect=True)
def test_prompts_are_taken_in_alike_by_what_was_recorded(make_rig: MakeRig) -> None:
    plain, rig = make_rig(), make_rig()
    strategy = rig.drafter._engine.strategy
    assert isinstance(strategy, PagedStrategy)
    assert strategy.growth is not None
    memory, graphs = strategy.growth.memory, PlayedGraphs()
    model, size = memory.grower._model, rig.feature_size
    extension = ExtendGraph(model, strategy._attention, memory.pool, size, torch.float32, graphs, (4, 16))
    strategy.growth = DeviceGrowth(memory, None, extension)
    before = [plane.clone() for plane in memory.pool.planes()]
    extension.record()
    assert graphs.captured == [16, 4]
    assert all(torch.equal(plane, was) for plane, was in zip(memory.pool.planes(), before, strict=True))
    for index, length in enumerate((2, 5, 9, 16, 30), 1):
        prompt = [(index * 7 + 3 * place) % rig.vocab_size for place in range(length)]
        streams = [(each, each.open(index, prompt, 0.0)) for each in (plain, rig)]
        for tokens in ([4], [9, 8, 7, 6, 5, 4], [1]):
            for each, stream in streams:
                each.propose([stream], SHAPES[1])
            (want, want_state), (have, have_state) = (kept(each, index) for each, _ in streams)
            torch.testing.assert_close(have, want)
            torch.testing.assert_close(have_state, want_state, atol=1e-5, rtol=1e-5)
            for each, stream in streams:
                each.commit(stream, tokens)
    assert set(graphs.runs) == {4, 16}
    for each in (plain, rig):
        each.drafter.shutdown()


def kept(rig: Rig, session_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a session's KV ``[planes, rows, ...]`` and its last state."""
    engine = rig.drafter._engine
    session, strategy = engine.sessions.get(HOST_PEER, session_id), engine.strategy
    assert isinstance(strategy, PagedStrategy)
    assert session is not None
    assert session.lease is not None
    assert session.last_state is not None
    slots = strategy._pool.token_slots(session.lease, 0, session.cached_rows)
    return torch.stack([plane.flatten(0, 1)[slots] for plane in strategy._pool.planes()]), session.last_state


def test_pages_that_are_to_be_seen_later_are_seen_when_it_is_time() -> None:
    lease = PageAllocator(8).allocate(2)
    assert lease is not None
    table = PageTable(2, 4, CPU)
    table.update([lease, None])
    first = table.tensor.tolist()
    assert first == [[*lease.pages, 0, 0], [0] * 4]
    assert lease.extend(1)
    table.update([lease, None], later=True)
    assert table.tensor.tolist() == first
    table.flush()
    assert table.tensor.tolist() == [[*lease.pages, 0], [0] * 4]
    assert lease.extend(1)
    table.update([lease, None], later=True)
    table.update([lease, None])  # an update without `later` also flushes pending changes
    assert table.tensor.tolist() == [lease.pages, [0] * 4]
    assert table.places.tolist() == [lease.pages[0], 0]


def test_a_sequence_has_its_place_at_its_first_page_that_was_not_stored() -> None:
    pages = PageAllocator(8)
    lease = pages.allocate(2, shared=[5, 6])
    assert lease is not None
    table = PageTable(1, 4, CPU)
    table.update([lease])
    assert table.tensor.tolist() == [lease.pages]
    assert lease.pages[:2] == [5, 6]
    assert table.places.tolist() == [lease.pages[2]] == [lease.first_new_page]
    lease.shared = 3  # another sequence may read the page from now on
    assert lease.first_new_page == lease.pages[2]
