"""Tests of short prompts in captured passes on a GPU: tokens, K/V and features equal an eager pass's."""

from __future__ import annotations

import pytest
import torch
from support.prefill_rig import CASES, SAMPLINGS, SIZES, UNTOUCHED, check_same, make_runner
from support.toys import make_toy_target

from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=64, seed=3), CUDA, torch.float32
    )


@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.OFF])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
def test_equals_the_eager_pass(decoder: Decoder, sampling: SamplingParams, mode: SpeculationMode) -> None:
    graphs = GraphCache(CUDA)
    for length, cuts in CASES:
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
        check_same(plain, padded, length, cuts, sampling, mode)
        graphs.clear()
