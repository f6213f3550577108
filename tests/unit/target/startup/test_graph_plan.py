"""Tests of the graphs that a target records and of the rounds that it keeps on the device, by settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.engine.recorder import GraphRecorder, Recording
from outrider.services.target.engine.recordings import USUAL_MODES, Recordings
from outrider.services.target.model.packed_batch import SamplingMode
from outrider.services.target.model.prefill_graph import PREFILL_SIZES, WHOLE_PROMPT_SIZES
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup import graph_plan
from outrider.services.target.startup.graph_plan import (
    GraphPlan,
    background_works,
    compile_kernels,
    list_graphs,
    other_trees,
    plan_graphs,
    record_graphs,
)
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.buckets import batch_buckets, bucket
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.obs import progress
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
    assert (loop.max_depth, loop.max_nodes) == (12, 100)
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


class ListedGraphs:
    """Stands for the recordings of an engine. A recording adds what it stands for to `made`."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def masked(self) -> list[Recording]:
        return []

    def rounds(
        self, batches: list[tuple[int, DraftShape]], modes: Sequence[SamplingMode] = USUAL_MODES
    ) -> list[Recording]:
        return [self._one((*batch, mode)) for batch in batches for mode in modes]

    def mixed(
        self, _modes: Sequence[SamplingMode] = (), sizes: Sequence[int] = (512, 448)
    ) -> list[Recording]:
        return [self._one(("mixed", rows)) for rows in sizes]

    def prompt(self, size: int) -> Recording:
        return self._one(("prompt", size))

    def whole_prompt(self, size: int) -> Recording:
        return self._one(("whole prompt", size))

    def _one(self, what: Any) -> Recording:
        return str(what), lambda: self.made.append(what)


def planned(plan: GraphPlan) -> tuple[list[Any], list[Any]]:
    """Return what is recorded before the server is ready, and afterwards."""
    listed = ListedGraphs()
    recordings = list_graphs(cast(Recordings, listed), plan)
    for _, record in recordings.first:
        record()
    first = list(listed.made)
    for _, record in recordings.further:
        record()
    return first, listed.made[len(first) :]


def test_few_greedy_rounds_are_recorded_before_the_server_is_ready() -> None:
    first, _ = planned(plan_graphs(settings(max_running_requests=256), cuda=True, waits=False))
    plain = [(size, NO_DRAFT, SamplingMode.GREEDY) for size in (256, 64, 16, 4, 1)]
    assert first == [*plain, (1, DraftShape(5, 4, 16), SamplingMode.GREEDY)]


def test_without_speculation_only_plain_rounds_are_recorded() -> None:
    plan = plan_graphs(settings(num_draft_tokens=1), cuda=True, waits=False)
    first, further = planned(plan)
    assert {shape for _, shape, _ in first} == {NO_DRAFT}
    assert {one[1] for one in further if len(one) == 3} == {NO_DRAFT}


def test_everything_else_is_recorded_while_the_engine_is_idle() -> None:
    plan = plan_graphs(settings(max_running_requests=64, prefill_chunk=8192), cuda=True, waits=False)
    _, further = planned(plan)
    chains = {depth: DraftShape(depth, 1, depth + 1) for depth in (1, 3, 5, 10)}
    rounds = {one for one in further if len(one) == 3}

    def shapes(size: int, mode: SamplingMode) -> set[DraftShape]:
        return {shape for bs, shape, one in rounds if (bs, one) == (size, mode)}

    for mode in USUAL_MODES:
        assert shapes(32, mode) == {NO_DRAFT, DraftShape(5, 4, 16), *chains.values()}
        assert shapes(64, mode) == {NO_DRAFT, *(chains[depth] for depth in (1, 3, 5))}
    assert shapes(64, SamplingMode.FILTERED) == {NO_DRAFT}
    for what, sizes in (("prompt", PREFILL_SIZES), ("whole prompt", WHOLE_PROMPT_SIZES)):
        assert [one[1] for one in further if one[0] == what] == list(sizes[::-1])
    assert further[0] == ("mixed", 512), "smaller graphs must be able to reuse the memory of the largest"
    assert further[-1] == ("mixed", 448)


def test_the_start_records_the_first_graphs_and_leaves_the_others() -> None:
    engine = SimpleNamespace(recordings=ListedGraphs(), recorder=GraphRecorder(GraphCache("cpu")))
    plan = plan_graphs(settings(max_running_requests=64), cuda=True, waits=False)
    graphs = GraphCache("cpu")
    record_graphs(cast(TargetEngine, engine), graphs, plan, to_console=False)
    assert not engine.recorder.planned, "nothing is planned if graphs are disabled"
    graphs.enabled = True
    record_graphs(cast(TargetEngine, engine), graphs, plan, to_console=False)
    first, further = planned(plan)
    assert engine.recordings.made == first
    assert engine.recorder.num_further == len(further)
    assert engine.recorder.planned, "graphs of a draft that connects later must be planned"


def test_compiling_and_recording_log_the_percentage_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[tuple[str, int]] = []

    def info(title: str, percent: int | None = None, left_s: int | None = None, **_more: Any) -> None:
        if percent is not None:
            assert left_s is not None
            lines.append((title, percent))

    def compile_three(device: torch.device, pieces: Sequence[Any], tell: Any = None, **_more: Any) -> int:
        for done in (1, 2, 3) if tell else ():
            tell(done, 4)
        return 3

    monkeypatch.setattr(progress, "LINE_S", 0.0)
    monkeypatch.setattr(graph_plan, "_log", SimpleNamespace(info=info))
    monkeypatch.setattr(graph_plan, "compile_ahead", compile_three)
    plan = plan_graphs(settings(max_running_requests=4), cuda=True, waits=False)
    cuda: Any = SimpleNamespace(device=torch.device("cuda"), observed=False, enabled=True)
    engine: Any = SimpleNamespace(recordings=ListedGraphs(), recorder=GraphRecorder(GraphCache("cpu")))
    compile_kernels(engine, cuda, plan, to_console=False)
    assert lines == [("compiling kernels", 25), ("compiling kernels", 50), ("compiling kernels", 75)]
    lines.clear()
    graphs = GraphCache("cpu")
    graphs.enabled = True
    record_graphs(engine, graphs, plan, to_console=False)
    total = len(planned(plan)[0])
    assert lines == [("recording CUDA graphs", 100 * done // total) for done in range(1, total)]


def test_a_stop_ends_the_recording() -> None:
    engine = SimpleNamespace(recordings=ListedGraphs(), recorder=GraphRecorder(GraphCache("cpu")))
    graphs = GraphCache("cpu")
    graphs.enabled = True
    plan = plan_graphs(settings(), cuda=True, waits=False)
    made = engine.recordings.made
    record_graphs(cast(TargetEngine, engine), graphs, plan, to_console=False, stopped=lambda: len(made) == 2)
    assert len(made) == 2
    assert engine.recorder.next_due is None, "the engine's thread must not go on"


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
    assert plan.prefills == PREFILL_SIZES
    for none in (
        plan_graphs(settings(), cuda=False, waits=True),
        plan_graphs(settings(prefill_chunk=8192, **values), cuda=True, waits=False),
    ):
        assert none.prefills == ()


@pytest.mark.parametrize(
    ("chunk", "last"), [(10, 16), (16, 16), (17, 32), (512, 512), (513, 640), (3000, 2048)]
)
def test_no_pass_larger_than_a_chunk_is_recorded(chunk: int, last: int) -> None:
    plan = plan_graphs(settings(prefill_chunk=chunk), cuda=True, waits=False)
    assert plan.prefills[-1] == last


def test_padding_is_at_most_a_quarter_of_a_long_pass() -> None:
    for rows in range(385, PREFILL_SIZES[-1] + 1):
        size = bucket(PREFILL_SIZES, rows)
        assert size is not None
        assert size - rows <= size / 4


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

    monkeypatch.setattr(
        graph_plan, "compile_ahead", lambda device, pieces, tell: rehearsed.append(len(pieces)) or 0
    )
    monkeypatch.setattr(
        graph_plan, "_log", SimpleNamespace(info=lambda text, **more: said.append(more["why"]))
    )
    plan = plan_graphs(settings(**values), cuda=True, waits=waits, offers=False)
    graphs: Any = SimpleNamespace(device=torch.device("cuda"), observed=observed, enabled=plan.graphs)
    engine: Any = SimpleNamespace(recordings=ListedGraphs())
    compile_kernels(engine, graphs, plan, [lambda: None], to_console=False)
    if compiles:
        assert rehearsed == [1 + len(plan.first_batches) * len(USUAL_MODES)], (
            "warm-up requests are sampled too"
        )
        assert not said
    else:
        assert not rehearsed
        assert len(said) == 1


def test_recordings_that_a_late_draft_adds_are_rehearsed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[Any] = []
    monkeypatch.setattr(
        graph_plan, "compile_ahead", lambda device, pieces, tell: rehearsed.extend(pieces) or 0
    )
    plan = plan_graphs(settings(), cuda=True, waits=False)
    graphs: Any = SimpleNamespace(device=torch.device("cuda"), observed=False, enabled=True)
    engine: Any = SimpleNamespace(recordings=ListedGraphs())
    compile_kernels(engine, graphs, plan, to_console=False)
    for rehearse in rehearsed:
        rehearse()
    made = engine.recordings.made
    assert made[0][0] == 1
    assert made[0][1].drafts, "if the first pieces miss no kernel, the rest is skipped"
    assert made[-1][:2] == (16, NO_DRAFT)


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


def test_every_number_of_branches_has_a_tree_whose_kernels_are_compiled_ahead() -> None:
    tree = DraftShape(5, 4, 16)
    assert other_trees(tree, 16, 128) == (DraftShape(5, 2, 11), DraftShape(5, 8, 41), DraftShape(5, 16, 81))
    assert other_trees(tree, 6, 30) == (DraftShape(5, 2, 11), DraftShape(5, 6, 30))
    assert other_trees(DraftShape(5, 1, 6), 3, 128) == (DraftShape(5, 2, 11), DraftShape(5, 3, 16))
    assert plan_graphs(settings(max_topk=8), cuda=True, waits=False).other_trees[-1].topk == 8
    assert plan_graphs(settings(), cuda=True, waits=False).shapes[1] == tree


def test_the_most_urgent_kernels_are_compiled_first_in_the_background() -> None:
    """If the first pieces of a list miss no kernel, the rest of the list is skipped."""
    plan = plan_graphs(settings(max_topk=8, max_running_requests=24), cuda=True, waits=False)
    listed = ListedGraphs()
    lists = background_works(cast(Recordings, listed), plan, [lambda: listed.made.append("prompt"), fail])
    assert [all_sizes for _works, all_sizes in lists] == [False, True, False]
    made = []
    for works, _all_sizes in lists:
        listed.made.clear()
        for work in works:
            work()
        made.append(list(listed.made))
    of_one, usual, more = made
    assert {size for size, _shape, _mode in of_one} == {1}
    assert {mode for _size, _shape, mode in of_one} == set(SamplingMode)
    assert usual[0][:2] == (1, plan.shapes[1])
    assert usual[-1] == "prompt"
    mixed = [what[1] for what in more if what[0] == "mixed"]
    assert {8, 64, 256} < set(mixed)
    assert {what[:2] for what in more[len(mixed) :]} == {
        *((1, shape) for shape in plan.other_trees),
        *((24, shape) for shape in plan.shapes[1:]),
    }


def fail() -> None:
    raise AssertionError("one prompt is enough")
