"""Tests that CUDA graphs capture the features of the current draft.

At startup, recording waits for the draft. If another draft connects, the idle engine records graphs again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.played_graphs import BoundedGraphs
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    generate_plain,
    load_toy,
    make_harness,
    random_plan,
)
from support.models.toys import make_toy_target

from outrider.services.target import app
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.engine import LOOK_S
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.engine.recorder import IDLE_S, GraphRecorder, RecordingList
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.graph_plan import GraphPlan, await_draft, plan_graphs
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState, FeatureSpec
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]
TREE = DraftShape(3, 2, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    loaded: Decoder = load_toy(folder)
    return loaded


def spec_of(decoder: Decoder, name: str) -> FeatureSpec:
    return FeatureSpec(aux_layer_ids=(1, 3, 4), feature_size=3 * decoder.config.hidden_size, fingerprint=name)


def listed(harness: Harness) -> RecordingList:
    recordings = harness.engine.recordings
    return RecordingList([*recordings.rounds([(1, NO_DRAFT), (1, TREE)]), recordings.prompt(32)], [])


def of_a_draft(key: Hashable) -> bool:
    return isinstance(key, GraphKey) and key.draft_dependent


def recorded(decoder: Decoder, drafter: AnswerDrafter) -> tuple[Harness, BoundedGraphs]:
    """Return an engine that has recorded its startup graphs."""
    graphs = BoundedGraphs(8)
    plan = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=8)
    harness = make_harness(decoder, drafter, plan=plan, graphs=graphs, max_running=2)
    harness.engine.recorder.follow(lambda: listed(harness))
    while harness.engine.recorder.num_first:
        harness.engine.recorder.record_next()
    return harness, graphs


def test_graphs_of_another_draft_are_recorded_while_idle(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 30)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, spec=spec_of(decoder, "one"), checked=False)
    harness, graphs = recorded(decoder, drafter)
    engine, start = harness.engine, graphs.keys
    assert not engine.has_work()
    due = engine.next_wakeup()
    assert drafter.state() is DrafterState.ON
    assert due is not None, "an idle engine must poll for a newly connected draft"
    assert due - time.monotonic() <= LOOK_S
    drafter.spec = spec_of(decoder, "one")
    assert engine.has_work(), "the engine must check whether the draft changed"
    engine.step()
    assert not engine.has_work()
    assert graphs.observer.gone == [], "graphs must stay when the same draft returns"

    drafter.spec = spec_of(decoder, "two")
    asked = engine.ask_recorded()
    assert engine.has_work()
    for _ in range(len(start) + 1):
        assert not asked.is_set()
        engine.step()
        if not engine.has_work():
            break
    assert asked.is_set()
    assert not engine.has_work()
    assert set(graphs.keys) == set(start)
    assert {of_a_draft(key) for key in start} == {True, False}
    assert graphs.captured[len(start) :] == [key for key in start if of_a_draft(key)], (
        "graphs of plain decoding must stay, since they contain nothing of a draft"
    )

    drafter.spec = spec_of(decoder, "three")
    harness.submit(PROMPT, 30, request_id="first", shape=(3, 2, 7))
    before = len(graphs.captured)
    while harness.engine.num_live:
        engine.step()
    assert harness.sink.tokens["first"] == plain
    kinds = [key.kind for key in graphs.captured[before:] if isinstance(key, GraphKey)]
    assert sorted(kinds) == ["draft", "verify"], "while a request is live, only frequent keys may be recorded"
    harness.run()
    assert set(start) <= set(graphs.keys)


def test_an_idle_engine_records_one_graph_at_a_time_until_a_request_arrives(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 6)
    now, made = [100.0], list[int]()
    graphs = BoundedGraphs(8)
    recorder = GraphRecorder(graphs, clock=lambda: now[0])
    harness = make_harness(decoder, NoDrafter(), graphs=graphs, recorder=recorder)
    engine = harness.engine
    further = [(str(number), partial(made.append, number)) for number in range(5)]
    recorder.follow(lambda: RecordingList([], further))
    engine.step()
    assert made == [0]
    harness.submit(PROMPT, 6, request_id="a")
    while engine.num_live:
        engine.step()
    assert made == [0], "a live request must not wait for a recording"
    assert harness.sink.tokens["a"] == plain
    assert not engine.has_work(), "the next request may follow soon"
    assert engine.next_wakeup() == now[0] + IDLE_S
    now[0] += IDLE_S
    engine.step()
    engine.step()
    assert made == [0, 1, 2]
    harness.submit(PROMPT, 6, request_id="b")
    engine.step()
    assert made == [0, 1, 2]
    harness.run()
    now[0] += IDLE_S
    harness.run()
    assert made == [0, 1, 2, 3, 4]
    assert engine.next_wakeup() is None


def test_the_wait_for_a_draft_is_bounded() -> None:
    drafter = FakeDrafter(random_plan(VOCAB))
    assert await_draft(drafter, 5.0, lambda: False) < 1.0
    drafter.current_state = DrafterState.CONNECTING
    assert await_draft(drafter, 5.0, lambda: True) < 1.0
    started = time.monotonic()
    assert await_draft(drafter, 0.05, lambda: False) >= 0.05
    assert time.monotonic() - started < 5.0


class LateDrafter(FakeDrafter):
    """Connects after its state was read `asked` times."""

    def __init__(self, spec: FeatureSpec, asked: int) -> None:
        super().__init__(random_plan(VOCAB), spec)
        self.left = asked

    def state(self) -> DrafterState:
        self.left -= 1
        return DrafterState.ON if self.left < 0 else DrafterState.CONNECTING

    def feature_spec(self) -> FeatureSpec | None:
        return self.spec if self.left < 0 else None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> BoundedGraphs:
    """Let a target on a CPU record graphs."""
    graphs = BoundedGraphs(8)

    def planned(settings: TargetSettings, **_given: bool) -> GraphPlan:
        return plan_graphs(settings, cuda=True, waits=False)

    monkeypatch.setattr(app, "GraphCache", lambda *_given: graphs)
    monkeypatch.setattr(app, "plan_graphs", planned)
    return graphs


SIZES: dict[str, Any] = {
    "max_running_requests": 1,
    "num_steps": 2,
    "topk": 1,
    "num_draft_tokens": 3,
    "max_steps": 2,
    "max_nodes": 4,
}


@pytest.mark.parametrize("draft_wait_s", [20.0, 0.0], ids=["waits", "goes on"])
def test_graphs_for_the_draft_are_recorded_before_the_target_is_ready(
    decoder: Decoder, folder: Path, graphs: BoundedGraphs, draft_wait_s: float
) -> None:
    drafter = LateDrafter(spec_of(decoder, "late"), 12)
    settings = TargetSettings.load(
        {"model": folder, "device": "cpu", "kv_tokens": 4096, "draft_wait_s": draft_wait_s, **SIZES}
    )
    target = app.Target(settings, lambda *_given: drafter)
    try:
        asyncio.run(target.wait_for_draft(20.0))
        assert drafter.left < 0, "the draft must have connected"
        assert not graphs.observer.gone, "no recorded graph may be dropped"
        kinds = {key.kind for key in graphs.keys if isinstance(key, GraphKey) and key.draft_dependent}
        assert "verify" in kinds
    finally:
        target.shutdown()


@pytest.mark.parametrize("when", ["at once", "while it waits", "while it records"])
def test_a_stop_ends_the_wait_for_a_draft_and_the_recording(
    decoder: Decoder, folder: Path, graphs: BoundedGraphs, when: str
) -> None:
    drafter = LateDrafter(spec_of(decoder, "late"), 0 if when == "while it records" else 1_000_000)
    due = {
        "at once": lambda: True,
        "while it waits": lambda: drafter.left < 999_990,
        "while it records": lambda: len(graphs.captured) >= 2,
    }
    settings = TargetSettings.load(
        {"model": folder, "device": "cpu", "kv_tokens": 4096, "draft_wait_s": 600.0, **SIZES}
    )
    started = time.monotonic()
    target = app.Target(settings, lambda *_given: drafter, stopped=due[when])
    target.shutdown()
    assert time.monotonic() - started < app.RECORD_LIMIT_S
    kinds = [key[0] for key in graphs.captured]  # type: ignore[index]
    assert len(kinds) <= {"at once": 0, "while it waits": 1, "while it records": 3}[when], (
        "only the graph of the parity check, which comes first, may be recorded"
    )


def test_a_signal_stops_startup(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bool] = []

    def made(*_given: object, stopped: Callable[[], bool], **_more: object) -> None:
        asked.append(stopped())
        os.kill(os.getpid(), signal.SIGTERM)
        while not stopped():
            time.sleep(0.01)
        asked.append(stopped())

    monkeypatch.setattr(app, "Target", made)
    settings = TargetSettings.load({"model": folder, "device": "cpu", "listen": f"unix:{tmp_path}/t.sock"})
    assert asyncio.run(app._serve(settings, None)) == 0
    assert asked == [False, True]
