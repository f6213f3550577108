"""Tests of the graphs that a target records and of the rounds that it keeps on the device, by settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.engine.recordings import Recording
from outrider.services.target.engine.rerecording import Rerecording
from outrider.services.target.model.prefill_graph import IDLE_PREFILL_SIZES, PREFILL_SIZES
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup import graph_plan
from outrider.services.target.startup.graph_plan import (
    compile_kernels,
    plan_graphs,
    record_graphs,
)
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.buckets import batch_buckets, bucket
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.tree import NO_DRAFT, DraftShape


def settings(**values: Any) -> TargetSettings:
    return TargetSettings.load({"model": Path("model"), "device": "cpu", **values})


def test_a_cpu_records_nothing_and_reads_each_round_first() -> None:
    plan = plan_graphs(settings(), cuda=False, waits=True)
    assert not plan.graphs
    assert (plan.loop.lookahead, plan.loop.drafts_on_device) == (0, False)


def test_rounds_ahead_can_be_enabled_on_a_cpu() -> None:
    plan = plan_graphs(settings(overlap_schedule="on"), cuda=False, waits=True)
    assert (plan.loop.lookahead, plan.loop.drafts_on_device) == (1, True)
    assert not plan.graphs


def test_a_gpu_records_the_usual_shapes() -> None:
    given = settings(max_running_requests=48, num_steps=5, topk=8, num_draft_tokens=32)
    plan = plan_graphs(given, cuda=True, waits=False, offers=False)
    assert plan.graphs
    assert (plan.loop.lookahead, plan.loop.drafts_on_device) == (1, True)
    assert plan.batch_sizes == (1, 2, 4, 8, 16, 24, 32, 48)
    assert plan.shapes == (NO_DRAFT, DraftShape(5, 8, 32), DraftShape(5, 1, 6))
    assert plan.shapes_at(16) == plan.shapes
    assert plan.shapes_at(48) == (NO_DRAFT, DraftShape(5, 1, 6)), "1536 rows are recorded on demand only"


def test_the_loop_serves_every_shape_that_requests_may_ask_for() -> None:
    given = settings(max_steps=12, max_nodes=100, num_steps=5, max_packed_rows=600, prefill_budget_ms=35)
    loop = plan_graphs(given, cuda=True, waits=False).loop
    assert (loop.max_depth, loop.max_nodes, loop.columns) == (12, 100, 6)
    assert loop.max_packed_rows == 600
    assert loop.prefill_budget_s == pytest.approx(0.035)


def test_the_loops_limits_have_defaults() -> None:
    loop = plan_graphs(settings(), cuda=True, waits=False).loop
    assert loop.max_packed_rows == 2048
    assert loop.prefill_budget_s == pytest.approx(0.02)


def test_auto_is_offered_a_tree_and_chains_no_larger_than_pays() -> None:
    forms = settings(max_running_requests=64).limits().resolve(SpeculationMode.AUTO).forms
    tree, chains = DraftShape(5, 4, 16), [DraftShape(depth, 1, depth + 1) for depth in (1, 3, 5, 10)]
    assert forms == (tree, chains[-1])
    assert set(offered_shapes(forms, 1)) == {tree, *chains}
    assert set(offered_shapes(forms, 32)) == {tree, *chains}
    assert set(offered_shapes(forms, 64)) == set(chains[:-1]), "704 rows must not be offered"
    assert offered_shapes(forms[1:], 400) == (chains[0],), "the smallest shape must always be offered"


def test_the_shapes_of_auto_are_recorded_at_startup() -> None:
    asked: list[tuple[int, DraftShape]] = []

    class Engine:
        rerecording = Rerecording(GraphCache("cpu"))

        def recordings(self, batches: list[tuple[int, DraftShape]]) -> list[Recording]:
            return [("a round", lambda batch=batch: asked.append(batch)) for batch in batches]  # type: ignore[misc]

        def prefill_recording(self, size: int, whole: bool = False) -> Callable[[], None]:
            return lambda: None

    plan = plan_graphs(settings(max_running_requests=64), cuda=True, waits=False)
    graphs = GraphCache("cpu")
    graphs.enabled = True
    record_graphs(cast(TargetEngine, Engine()), graphs, plan, to_console=False)
    chains = {depth: DraftShape(depth, 1, depth + 1) for depth in (1, 3, 5, 10)}
    assert {shape for bs, shape in asked if bs == 32} == {NO_DRAFT, DraftShape(5, 4, 16), *chains.values()}
    assert {shape for bs, shape in asked if bs == 64} == {NO_DRAFT, *(chains[depth] for depth in (1, 3, 5))}
    assert len(asked) == len(set(asked)), "each shape must be recorded once"
    assert Engine.rerecording.planned, "graphs of a draft that connects later must be planned"


@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({}, 10),
        ({"num_steps": 5}, 5),
        ({"num_steps": 12}, 12),
        ({"num_draft_tokens": 7}, 6),
        ({"topk": 1}, 10),
        ({"topk": 1, "num_steps": 3}, 3),
        ({"max_steps": 6}, 6),
    ],
)
def test_chains_stay_within_explicit_bounds(given: dict[str, Any], longest: int) -> None:
    limits = settings(**given).limits()
    assert limits.resolve(SpeculationMode.AUTO).forms[-1] == DraftShape(longest, 1, longest + 1)
    assert limits.resolve(SpeculationMode.AUTO, depth=4, max_nodes=4).most_nodes == 4
    assert limits.resolve(SpeculationMode.ON).forms == (limits.default.bounded(),)


@pytest.mark.parametrize(
    ("values", "graphs", "overlaps"),
    [
        ({"disable_cuda_graph": True}, False, True),
        ({"disable_overlap_schedule": True}, True, False),
        ({"overlap_schedule": "off"}, True, False),
        ({"overlap_schedule": "on", "disable_overlap_schedule": True}, True, False),
    ],
)
def test_each_can_be_turned_off(values: dict[str, Any], graphs: bool, overlaps: bool) -> None:
    plan = plan_graphs(settings(**values), cuda=True, waits=False)
    assert (plan.graphs, bool(plan.loop.lookahead)) == (graphs, overlaps)
    assert plan.loop.drafts_on_device == overlaps


@pytest.mark.parametrize(
    "values", [{"deterministic": True}, {"tp": 2}, {"disable_cuda_graph": True}], ids=str
)
def test_prompts_are_recorded_where_that_changes_nothing(values: dict[str, Any]) -> None:
    plan = plan_graphs(settings(prefill_chunk=8192), cuda=True, waits=False)
    assert (plan.prefills, plan.idle_prefills) == (PREFILL_SIZES, IDLE_PREFILL_SIZES)
    for none in (
        plan_graphs(settings(), cuda=False, waits=True),
        plan_graphs(settings(prefill_chunk=8192, **values), cuda=True, waits=False),
    ):
        assert (none.prefills, none.idle_prefills) == ((), ())


@pytest.mark.parametrize(
    ("chunk", "last"), [(10, 16), (16, 16), (17, 32), (512, 512), (513, 640), (3000, 2048)]
)
def test_no_pass_larger_than_a_chunk_is_recorded(chunk: int, last: int) -> None:
    plan = plan_graphs(settings(prefill_chunk=chunk), cuda=True, waits=False)
    assert (*plan.prefills, *plan.idle_prefills)[-1] == last


def test_padding_is_at_most_a_quarter_of_a_long_pass() -> None:
    sizes = (*PREFILL_SIZES, *IDLE_PREFILL_SIZES)
    for rows in range(385, sizes[-1] + 1):
        size = bucket(sizes, rows)
        assert size is not None
        assert size - rows <= size / 4


def test_large_passes_over_prompts_are_recorded_while_idle() -> None:
    recorded: list[int | tuple[int, str]] = []

    class Engine:
        rerecording = Rerecording(GraphCache("cpu"))

        def recordings(self, batches: list[tuple[int, DraftShape]]) -> list[Recording]:
            return []

        def prefill_recording(self, size: int, whole: bool = False) -> Callable[[], None]:
            return lambda: recorded.append((size, "alone") if whole else size)

    graphs = GraphCache("cpu")
    graphs.enabled = True
    engine, plan = Engine(), plan_graphs(settings(prefill_chunk=1024), cuda=True, waits=False)
    record_graphs(cast(TargetEngine, engine), graphs, plan, to_console=False)
    assert recorded == list(PREFILL_SIZES[::-1]), "the largest first, because smaller ones reuse its memory"
    recorded.clear()
    engine.rerecording.begin_later()
    while engine.rerecording.waiting:
        done = len(recorded)
        engine.rerecording.record_next()
        assert len(recorded) <= done + 1, "a request must not wait for several recordings"
    alone = [(size, "alone") for size in (1024, 768, 640, 512)]
    assert recorded == [1024, 768, 640, *alone]
    recorded.clear()
    engine.rerecording.renew()
    while engine.rerecording.waiting:
        engine.rerecording.record_next()
    assert recorded == [*PREFILL_SIZES[::-1], 1024, 768, 640, *alone], (
        "another draft needs other graphs of all sizes"
    )


def test_a_backend_that_waits_for_the_device_is_not_recorded() -> None:
    plan = plan_graphs(settings(), cuda=True, waits=True)
    assert (plan.graphs, plan.loop.lookahead) == (False, 0)


@pytest.mark.parametrize(
    ("values", "waits", "observed", "compiles"),
    [
        ({}, False, False, True),
        ({"disable_cuda_graph": True}, False, False, True),
        ({"disable_cuda_graph": True, "disable_overlap_schedule": True}, False, False, True),
        ({"tp": 2}, False, True, False),
        ({"attention_backend": "flashinfer"}, True, False, False),
    ],
    ids=["graphs", "no graphs", "no graphs and no overlap", "tp", "flashinfer"],
)
def test_kernels_are_compiled_ahead_or_the_log_says_why_not(
    values: dict[str, Any], waits: bool, observed: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[int] = []
    said: list[str] = []

    class Engine:
        def recordings(self, batches: list[tuple[int, DraftShape]]) -> list[Recording]:
            return [("a round", lambda: None) for _batch in batches]

        def prefill_recording(self, size: int, whole: bool = False) -> Callable[[], None]:
            return lambda: None

    monkeypatch.setattr(
        graph_plan, "compile_ahead", lambda device, pieces, tell: rehearsed.append(len(pieces)) or 0
    )
    monkeypatch.setattr(
        graph_plan, "_log", SimpleNamespace(info=lambda text, **more: said.append(more["why"]))
    )
    plan = plan_graphs(settings(**values), cuda=True, waits=waits, offers=False)
    graphs: Any = SimpleNamespace(device=torch.device("cuda"), observed=observed, enabled=plan.graphs)
    compile_kernels(cast(TargetEngine, Engine()), graphs, plan, [lambda: None], to_console=False)
    if compiles:
        rounds = sum(len(plan.shapes_at(size)) for size in plan.batch_sizes)
        assert rounds > 0
        assert rehearsed == [1 + len(plan.prefills) + len(plan.idle_prefills) + rounds]
        assert not said
    else:
        assert not rehearsed
        assert len(said) == 1


def test_recordings_that_a_late_draft_adds_are_rehearsed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def recordings(self, batches: list[tuple[int, DraftShape]]) -> list[Any]:
            return [("a round", batch) for batch in batches]

        def prefill_recording(self, size: int, whole: bool = False) -> Any:
            return size

    rehearsed: list[Any] = []
    monkeypatch.setattr(
        graph_plan, "compile_ahead", lambda device, pieces, tell: rehearsed.extend(pieces) or 0
    )
    plan = plan_graphs(settings(prefill_chunk=8192), cuda=True, waits=False)
    graphs: Any = SimpleNamespace(device=torch.device("cuda"), observed=False, enabled=True)
    compile_kernels(cast(TargetEngine, Engine()), graphs, plan, to_console=False)
    assert rehearsed[0][0] == 1
    assert rehearsed[0][1].drafts, "if the first pieces miss no kernel, the rest is skipped"
    assert rehearsed[-1] == IDLE_PREFILL_SIZES[-1]


def test_a_default_tree_that_is_a_chain_is_listed_once() -> None:
    plan = plan_graphs(settings(num_steps=3, topk=1, num_draft_tokens=4), cuda=True, waits=False)
    assert plan.shapes == (NO_DRAFT, DraftShape(3, 1, 4))


@pytest.mark.parametrize("disabled", [False, True])
def test_recording_limits_do_not_limit_rounds_ahead(disabled: bool) -> None:
    given = settings(max_running_requests=48, cuda_graph_max_bs=4, disable_cuda_graph=disabled)
    plan = plan_graphs(given, cuda=True, waits=False)
    assert plan.loop.lookahead == 1
    assert plan.loop.recorded_entries == 4
    assert plan.batch_sizes == (1, 2, 4)


def test_batch_sizes_are_rounded_up_to_buckets() -> None:
    assert batch_buckets(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert [batch_buckets(limit) for limit in (1, 8, 24, 64)] == [
        (1,),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 16, 24),
        batch_buckets(100)[:9],
    ]
    assert [bucket(batch_buckets(20), count) for count in (1, 3, 17, 20, 21)] == [1, 4, 20, 20, None]
