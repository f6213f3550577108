"""Tests of prompt chunks in captured passes on a GPU: tokens, K/V and features equal an eager pass's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.prefill_rig import (
    CASES,
    SAMPLINGS,
    SIZES,
    SLOTS,
    UNTOUCHED,
    check_same,
    make_runner,
    make_sequence,
)
from support.models.toys import make_toy_target

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.prefill_graph import PREFILL_SIZES, WHOLE_PROMPT_SIZES
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.attn.create import create_backend
from outrider.shared.attn.library import Library
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("target")
    return load_decoder(
        make_toy_target(folder, vocab_size=64, seed=3, max_position_embeddings=4096), CUDA, torch.float32
    )


@pytest.mark.parametrize(
    "modes",
    [(SpeculationMode.ON,), (SpeculationMode.OFF,), (SpeculationMode.OFF, SpeculationMode.AUTO)],
    ids=["on", "off", "mixed"],
)
def test_equals_the_eager_pass(decoder: Decoder, modes: tuple[SpeculationMode, ...]) -> None:
    graphs = GraphCache(CUDA)
    for case in CASES:
        plain, padded = (
            make_runner(decoder, GraphCache(CUDA, enabled=False), ()),
            make_runner(decoder, graphs, SIZES),
        )
        for size in SIZES:
            padded.capture_prefill(size)
        torch.cuda.synchronize()
        assert all(bool((plane == UNTOUCHED).all()) for plane in padded.pool.planes()), (
            "the capture wrote into the pool"
        )
        assert len(graphs.keys) == len(SIZES)
        check_same(plain, padded, case, SAMPLINGS, modes)
        graphs.clear()


@pytest.mark.parametrize("size", [size for size in PREFILL_SIZES if size > 512])
def test_large_passes_are_recorded(decoder: Decoder, size: int) -> None:
    """A chunk and a short prompt, both behind a chunk that is stored already."""
    graphs = GraphCache(CUDA)
    pool = decoder.make_pool(2 * size + 256, 4)
    runner, eager = (
        ModelRunner(decoder, pool, create_backend("auto", CUDA), graphs=cache, prefill_sizes=(size,))
        for cache in (graphs, GraphCache(CUDA, enabled=False))
    )
    runner.use_slots(SlotTable(SLOTS, 2, pool, pool.num_pages, decoder.config.vocab_size))
    runner.capture_prefill(size)
    assert runner.recorded_rows(size) == size
    chosen = []
    for one in (eager, runner):
        sequences = [
            make_sequence(one, index, length, SAMPLINGS[0], SpeculationMode.OFF)
            for index, length in enumerate((size + 40, 30))
        ]
        first, second = sequences
        one.prefill([PrefillChunk(first, 0, 60)])
        chosen += one.prefill([PrefillChunk(first, 60, size + 40), PrefillChunk(second, 0, 20)])
        chosen += one.prefill([PrefillChunk(second, 20, 30)])
        for sequence in sequences:
            assert sequence.lease is not None
            sequence.lease.release()
    assert chosen[:2] == chosen[2:]


def last_rows(runner: ModelRunner, chunk: PrefillChunk) -> torch.Tensor:
    """Return the hidden states ``[1, hidden_size]`` of a chunk's last row, from a pass without a graph."""
    output, ends = runner._unrecorded([chunk], False)
    return output.hidden[ends]


@pytest.mark.parametrize("size", WHOLE_PROMPT_SIZES)
def test_prompts_alone_are_recorded_with_the_library(size: int, tmp_path: Path) -> None:
    """Compare hidden states in bf16, of full and padded passes, with fp32. Errors must be those of rounding.

    Hidden states of the same model by our kernel have about the same error.
    """
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the library is used on Hopper GPUs only")
    folder = make_toy_target(tmp_path, vocab_size=64, seed=3, head_dim=64, max_position_embeddings=4096)
    decoder, exact = (load_decoder(folder, CUDA, dtype) for dtype in (torch.bfloat16, torch.float32))
    kept, graphs = decoder.cached, GraphCache(CUDA)
    pool = decoder.make_pool(4 * size, 4)
    runner, eager = (
        ModelRunner(decoder, pool, KernelAttention(), graphs=cache, prefill_sizes=(size,))
        for cache in (graphs, GraphCache(CUDA, enabled=False))
    )
    truth = ModelRunner(
        exact,
        exact.make_pool(4 * size, 4),
        create_backend("auto", CUDA),
        graphs=GraphCache(CUDA, enabled=False),
        prefill_sizes=(size,),
    )
    attention = runner.attention
    assert isinstance(attention, KernelAttention)
    library = Library(kept.num_heads, kept.num_kv_heads, kept.head_dim, decoder.dtype, CUDA, size)
    assert next(library.prepare(attention.use_library), "refused") is None
    runner.use_slots(SlotTable(SLOTS, 2, pool, pool.num_pages, decoder.config.vocab_size))
    for whole in (False, True):
        runner.capture_prefill(size, whole)
    for plane in pool.planes():
        plane.fill_(torch.nan)
    recorded = runner._recorded
    assert recorded is not None
    for length in (size - 100, size, size - 1):
        sequence = make_sequence(runner, 0, length, SAMPLINGS[0], SpeculationMode.OFF)
        chunk = PrefillChunk(sequence, 0, length)
        assert recorded.takes_whole([chunk]), "the graph could not be recorded; the log has the reason"
        with torch.inference_mode():
            found = recorded.run([chunk], False).last.float().clone()
            ours = last_rows(eager, chunk).float()
            same = make_sequence(truth, 0, length, SAMPLINGS[0], SpeculationMode.OFF)
            expected = last_rows(truth, PrefillChunk(same, 0, length))
        rounding, error = ((one - expected).norm() / expected.norm() for one in (ours, found))
        assert rounding.item() < 0.1
        assert error.item() < 1.5 * rounding.item()
        for one in (sequence, same):
            assert one.lease is not None
            one.lease.release()
