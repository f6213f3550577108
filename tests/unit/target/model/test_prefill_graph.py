"""A prompt pass that is padded for a graph computes and writes the same as an unpadded pass."""

from __future__ import annotations

import numpy as np
import pytest
from support.played_graphs import PlayedGraphs
from support.prefill_rig import (
    CASES,
    PAGE_SIZE,
    SAMPLINGS,
    SIZES,
    UNTOUCHED,
    check_same,
    make_runner,
    make_sequence,
)
from support.target_harness import load_toy
from support.toys import make_toy_target

from outrider.services.target.model.prefill_graph import LONGEST_CONTEXT, PrefillGraph
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.attn.padded import PaddedRows
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=64, seed=3))


@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.OFF])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
@pytest.mark.parametrize(("length", "cuts"), CASES)
def test_equals_the_pass_over_the_prompt_alone(
    decoder: Decoder, length: int, cuts: list[int], sampling: SamplingParams, mode: SpeculationMode
) -> None:
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
    check_same(plain, padded, length, cuts, sampling, mode)
    assert len(graphs.runs) == len(cuts) + 1


def test_takes_single_short_prompts_that_were_recorded(decoder: Decoder) -> None:
    graphs = PlayedGraphs()
    runner = make_runner(decoder, graphs, SIZES)
    recorded = PrefillGraph(runner.step_model, graphs, SIZES)
    short = PrefillChunk(make_sequence(runner, 20, SamplingParams(0.0), SpeculationMode.ON), 0, 20)
    assert not recorded.takes([short]), "no graph is recorded yet"
    recorded.capture(32)
    assert recorded.takes([short])
    assert not recorded.takes([short, short]), "several prompts run as one unrecorded pass"
    filtered = make_sequence(runner, 20, SamplingParams(1.0, top_p=0.5), SpeculationMode.ON)
    assert not recorded.takes([PrefillChunk(filtered, 0, 20)])
    long = make_sequence(runner, LONGEST_CONTEXT + 8, SamplingParams(0.0), SpeculationMode.ON)
    assert not recorded.takes([PrefillChunk(long, 0, 33)])
    assert recorded.takes([PrefillChunk(long, LONGEST_CONTEXT - 32, LONGEST_CONTEXT)])
    assert not recorded.takes([PrefillChunk(long, LONGEST_CONTEXT - 31, LONGEST_CONTEXT + 1)])


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
