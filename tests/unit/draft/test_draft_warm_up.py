"""The draft's warm-up, unless disabled: graphs for the target's default tree and batches, in one cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.played_graphs import PlayedGraphs
from support.models.toys import make_toy_pair

from outrider.services.draft import app, warmup
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.growth.draft_graph import DraftGraph, DraftGraphs
from outrider.services.draft.peers.peer_slots import PeerSlots
from outrider.services.draft.serving import protocol
from outrider.services.draft.serving.loop import DraftLoop
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.warmup import compiled_batches, usual_shapes
from outrider.shared.engine import graphs as recording
from outrider.shared.spec.tree import DraftShape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"))


def engine_of(pair: tuple[Path, Path], **values: Any) -> DraftEngine:
    settings = DraftSettings.load(
        {"draft": pair[1], "target_weights": pair[0], "device": "cpu", "kv_tokens": 32768, **values}
    )
    return build_engine(settings, CPU, torch.float32)


def test_the_targets_tree_and_batches_are_made_ready(pair: tuple[Path, Path]) -> None:
    engine = engine_of(pair)
    assert usual_shapes(engine) == (DraftShape(5, 4, 16), DraftShape(5, 1, 6))
    assert compiled_batches(engine) == (1, 2, 4, 8, 16, 32, 64, 128), "more do not fit into the cache"
    engine = engine_of(pair, num_steps=3, topk=1, num_draft_tokens=4, max_sessions=20)
    assert usual_shapes(engine) == (DraftShape(3, 1, 4),)
    assert compiled_batches(engine) == (1, 2, 4, 8, 16, 32), "20 are padded to 32"
    assert compiled_batches(engine_of(pair, cuda_graph_max_bs=4)) == (1, 2, 4)
    assert compiled_batches(engine_of(pair, kv_tokens=1024)) == (1, 2, 4), "more do not fit"
    assert usual_shapes(engine_of(pair, max_steps=2, max_nodes=8))[0] == DraftShape(2, 4, 8)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_draft_that_borrows_tries_tiles_unless_it_is_told_not_to(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: bool
) -> None:
    made: list[protocol.DraftProtocol] = []
    tried: list[bool] = []

    class Made(protocol.DraftProtocol):
        def __init__(self, loop: DraftLoop, *given: Any, **more: Any) -> None:
            super().__init__(loop, *given, **more)
            made.append(self)

    monkeypatch.setattr(app, "DraftProtocol", Made)
    monkeypatch.setattr(protocol, "warm_up", lambda *_given, tiles: tried.append(tiles) or [])
    settings = {"draft": pair[1], "listen": f"unix:{tmp_path}/draft.sock", "device": "cpu", "kv_tokens": 4096}
    service = app.DraftService(DraftSettings.load({**settings, "disable_tile_trial": disabled}))
    for name, shape in service.engine.strategy.missing().items():
        made[0].lend(name, torch.zeros(shape))
    assert tried == [not disabled]


def test_a_draft_of_its_own_tries_tiles_for_a_short_time(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []
    monkeypatch.setattr(warmup, "try_products", lambda uses, device, budget_s: budgets.append(budget_s))
    warmup.warm_up(engine_of(pair, max_sessions=1), CPU)
    assert budgets == [5.0]


def test_all_rounds_of_a_draft_share_one_cache_that_can_be_turned_off(pair: tuple[Path, Path]) -> None:
    engine = engine_of(pair)
    growth = engine.strategy.growth
    assert growth is not None
    assert PeerSlots(engine, CPU).graphs is growth.graphs.cache
    for disabled in (False, True):
        graphs = DraftGraphs(CPU)
        graphs.cache.enabled = True  # as on a GPU
        graphs.limit(disabled=disabled, max_bs=8)
        assert (graphs.cache.enabled, graphs.max_bs) == (not disabled, 8)
    growth = engine_of(pair, disable_cuda_graph=True, cuda_graph_max_bs=8).strategy.growth
    assert growth is not None
    assert growth.graphs.max_bs == 8


def test_larger_batches_than_are_recorded_run_without(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RECORD_AFTER", 0)
    engine = engine_of(pair)
    growth = engine.strategy.growth
    assert growth is not None
    graphs = PlayedGraphs()
    host = DraftGraph(growth.memory, graphs, engine.strategy.info.feature_size, torch.float32, lambda: 4)
    for bs in (2, 4, 8):
        host.record(bs, DraftShape(2, 2, 4))
    assert [key[0].bs for key in graphs.captured] == [2, 4]  # type: ignore[index]


def test_warm_up_records_the_planned_rounds_and_no_others(pair: tuple[Path, Path]) -> None:
    for record in (False, True):
        engine = engine_of(pair)
        growth = engine.strategy.growth
        assert growth is not None
        graphs = PlayedGraphs()
        host = DraftGraph(growth.memory, graphs, engine.strategy.info.feature_size, torch.float32)
        engine.strategy.growth = replace(growth, host=host)
        further = warmup.warm_up(engine, CPU, record=record)
        assert not graphs.captured, "a restarted draft must serve soon"
        for work in further:
            work()
        recorded = [(key[0].bs, key[0].depth, key[0].topk) for key in graphs.captured]  # type: ignore[index]
        assert recorded == ([(1, 5, 4), (1, 5, 1)] if record else [])
