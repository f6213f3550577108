"""A prompt pass that is padded for a graph computes and writes the same as an unpadded pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine.played_graphs import PlayedGraphs
from support.engine.prefill_rig import (
    CASES,
    PAGE_SIZE,
    SAMPLINGS,
    SIZES,
    UNTOUCHED,
    Case,
    check_same,
    make_runner,
    make_sequence,
    prefill,
)
from support.kernels.tile_attention import Recorder, attend_tile

from outrider.services.target.model import model_runner
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.attn.chunks import Attend, ChunkAttention
from outrider.shared.attn.padded import PaddedRows
from outrider.shared.attn.tiles import TileShape, shapes_of
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.base.token_states import StateParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder

MODES = [(SpeculationMode.ON,), (SpeculationMode.OFF,), (SpeculationMode.OFF, SpeculationMode.AUTO)]


@pytest.mark.parametrize("modes", MODES, ids=["on", "off", "mixed"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_unrecorded_pass(decoder: Decoder, case: Case, modes: tuple[SpeculationMode, ...]) -> None:
    graphs = PlayedGraphs()
    plain, padded = (
        make_runner(decoder, GraphCache(decoder.device, enabled=False), ()),
        make_runner(decoder, graphs, SIZES),
    )
    for size in SIZES:
        padded.capture_prefill(size)
    assert all(bool((plane == UNTOUCHED).all()) for plane in padded.pool.planes()), (
        "a recording must not write to the pool"
    )
    check_same(plain, padded, case, SAMPLINGS, modes)
    rows = [sum(stop - start for _, start, stop in chunks) for chunks in case.passes]
    assert [key.rows for key in graphs.runs if isinstance(key, GraphKey)] == [
        next(size for size in SIZES if size >= count) for count in rows
    ]


def test_a_pass_may_follow_a_longer_one(decoder: Decoder) -> None:
    """Nothing of the pass before is left in the inputs."""
    graphs = PlayedGraphs()
    plain, padded = (
        make_runner(decoder, GraphCache(decoder.device, enabled=False), ()),
        make_runner(decoder, graphs, (32,)),
    )
    padded.capture_prefill(32)
    case = Case((20, 3, 2), (((0, 0, 17), (1, 0, 3), (2, 0, 1)), ((2, 1, 2),), ((0, 17, 20),)))
    check_same(plain, padded, case, SAMPLINGS, (SpeculationMode.ON, SpeculationMode.OFF))
    assert len(graphs.runs) == 3


def test_takes_passes_of_recorded_sizes(decoder: Decoder) -> None:
    graphs = PlayedGraphs()
    runner = make_runner(decoder, graphs, SIZES)
    sequences = [make_sequence(runner, index, 40, SAMPLINGS[2], SpeculationMode.ON) for index in range(2)]
    one, two = (PrefillChunk(sequence, 10, 26) for sequence in sequences)
    recorded = runner._recorded
    assert recorded is not None
    assert not recorded.takes([one]), "no graph is recorded yet"
    assert runner.recorded_rows(100) is None
    recorded.capture(32)
    assert recorded.takes([one])
    assert recorded.takes([one, two])
    assert not recorded.takes([one, replace(two, stop=27)]), "33 rows are too many"
    assert not recorded.takes([replace(one, stop=18)]), "8 rows have a size of their own"
    assert [runner.recorded_rows(most) for most in (31, 32, 100)] == [None, 32, 32]
    sequences[1].slot = -1
    assert not recorded.takes([one, two]), "the pages of a sequence without a slot are not on the device"


def test_states_and_logprobs_of_prompts_need_no_pass_without_a_graph(decoder: Decoder) -> None:
    graphs = PlayedGraphs()
    runners = (
        make_runner(decoder, GraphCache(decoder.device, enabled=False), ()),
        make_runner(decoder, graphs, SIZES),
    )
    runners[1].capture_prefill(32)
    found = []
    for runner in runners:
        sequences = [make_sequence(runner, index, 20, SAMPLINGS[0], SpeculationMode.ON) for index in range(2)]
        asking = sequences[1]
        asking.request = replace(
            asking.request,
            states=StateParams(hidden_states=True),
            logprobs=LogprobParams(prompt_top=2, token_ids=(3, 5)),
        )
        chosen = runner.begin_prefill([PrefillChunk(sequences[0], 2, 13), PrefillChunk(asking, 0, 20)])
        (scored,), (states,) = chosen.prompts, chosen.states
        assert scored.requested is not None
        assert states.rows.hidden is not None
        assert (scored.first, states.first, states.count) == (1, 0, 20)
        found.append((scored.logprobs, scored.requested, states.rows.hidden, chosen.on_device))
    assert len(graphs.runs) == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(("start", "long"), [(0, False), (10, False), (0, True)])
def test_long_passes_are_not_recorded_where_a_library_attends(
    decoder: Decoder, start: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "LIBRARY_ROWS", 16)
    graphs = PlayedGraphs()
    runner = make_runner(decoder, graphs, (32,))
    runner.capture_prefill(32)
    attention = KernelAttention()
    attention.chunks = ChunkAttention(
        attend_tile,
        shapes_of(16, (16, 8)),
        16,
        decoder.dtype,
        sizes=(16, 8),
        least_gain_us=float("-inf" if long else "inf"),
    )
    runner.attention = attention
    sequence = make_sequence(runner, 0, 40, SAMPLINGS[0], SpeculationMode.ON)
    runner.prefill([PrefillChunk(sequence, start, start + 16)])
    assert len(graphs.runs) == (not long)
    runner.prefill([PrefillChunk(sequence, 16, 31)])
    assert len(graphs.runs) == 1 + (not long), "short passes are recorded"


def by_library(runner: ModelRunner, attend: Attend = attend_tile) -> None:
    """Let a stand-in for a library attend from long prompts."""
    attention = KernelAttention()
    attention.use_library(ChunkAttention(attend, (), 16, runner.decoder.dtype))
    runner.attention = attention


@pytest.mark.parametrize("length", [17, 29, 32])
@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.OFF])
def test_a_prompt_alone_attends_by_the_library(decoder: Decoder, length: int, mode: SpeculationMode) -> None:
    graphs, attend = PlayedGraphs(), Recorder()
    plain, padded = (
        make_runner(decoder, GraphCache(decoder.device, enabled=False), ()),
        make_runner(decoder, graphs, SIZES),
    )
    by_library(padded, attend)
    padded.capture_prefill(32)
    padded.capture_prefill(32, whole=True)
    padded.capture_prefill(8)
    assert all(bool((plane == UNTOUCHED).all()) for plane in padded.pool.planes()), (
        "a recording must not write to the pool"
    )
    attend.shapes.clear()
    case = Case((length, 6, 12), (((0, 0, length),), ((1, 0, 6),), ((2, 0, 9),), ((2, 9, 12),)))
    padded.capture_prefill(4)
    check_same(plain, padded, case, SAMPLINGS, (mode,))
    kinds = [(key.kind, key.rows) for key in graphs.runs if isinstance(key, GraphKey)]
    assert kinds == [("prompt", 32), ("prefill", 8), ("prompt", 32), ("prefill", 4)]
    assert set(attend.shapes) == {TileShape(32, 32, True)}


def test_leftovers_in_the_prompts_pages_are_not_read(decoder: Decoder) -> None:
    plain, padded = (
        make_runner(decoder, GraphCache(decoder.device, enabled=False), ()),
        make_runner(decoder, PlayedGraphs(), (32,)),
    )
    by_library(padded)
    for whole in (False, True):
        padded.capture_prefill(32, whole)
    for plane in padded.pool.planes():
        plane.fill_(torch.nan)
    case = Case((19,), (((0, 0, 19),),))
    found, expected = (prefill(runner, case, SAMPLINGS, (SpeculationMode.OFF,)) for runner in (padded, plain))
    assert found == expected


def test_a_pass_that_the_library_fails_to_compute_is_not_recorded(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, attend = PlayedGraphs(), Recorder()
    runner = make_runner(decoder, graphs, (32,))
    runner.capture_prefill(32, whole=True)
    assert not graphs.captured, "without a library there is nothing to record"
    by_library(runner, attend)
    attend.fails = True
    runner.capture_prefill(32, whole=True)
    assert "prompts of 32 tokens have no graph" in caplog.text


def test_rows_are_padded_at_the_front(decoder: Decoder) -> None:
    pool = decoder.make_pool(8, PAGE_SIZE)
    pool.lease(4)
    lease = pool.lease(9)
    assert lease is not None
    rows = PaddedRows(5, 4, pool, extra=2)
    rows.load(lease, [11, 12, 13], 3, np.array([1, 2], dtype=np.int32))
    slots = pool.token_slots(lease, 3, 6)
    assert rows.tokens.tolist() == [0, 0, 11, 12, 13]
    assert rows.positions.tolist() == [0, 0, 3, 4, 5]
    assert rows.batch.slots.tolist() == [-1, -1, *slots]
    assert (rows.batch.prefix_lens.tolist(), rows.batch.kv_lens.tolist()) == ([3], [6])
    assert rows.batch.page_table.tolist() == [[*lease.pages, 0]]
    assert rows.extra.tolist() == [1, 2]
    rows.make_idle()
    assert rows.batch.slots.tolist() == [-1] * 5
    assert rows.batch.kv_lens.tolist() == [0]
