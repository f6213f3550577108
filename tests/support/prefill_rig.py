"""Prefills prompts with `ModelRunner`, with and without graphs, and compares the results, on any device."""

from __future__ import annotations

import itertools

import torch

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.request import GenerationRequest, SpeculationLimits
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.attn.create import create_backend
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec
from support.target_harness import Collector

SIZES = (4, 8, 32)
PAGE_SIZE = 4
UNTOUCHED = 7.0
CASES = [(1, []), (4, []), (5, []), (31, [6, 8]), (32, [])]
"""Prompt lengths, and the positions at which each prompt is cut into chunks."""
SAMPLINGS = [SamplingParams(0.0), SamplingParams(0.9, seed=(1 << 64) - 3, choice_index=2)]


def make_runner(decoder: Decoder, graphs: GraphCache, sizes: tuple[int, ...]) -> ModelRunner:
    """Make a runner that captures features. Every value of its pool is `UNTOUCHED`."""
    pool = decoder.make_pool(320, PAGE_SIZE)
    runner = ModelRunner(
        decoder, pool, create_backend("auto", decoder.device), graphs=graphs, prefill_sizes=sizes
    )
    runner.set_feature_spec(
        FeatureSpec(aux_layer_ids=(1, 3), feature_size=2 * decoder.config.hidden_size, fingerprint="raw")
    )
    for plane in pool.planes():
        plane.fill_(UNTOUCHED)
    return runner


def make_sequence(
    runner: ModelRunner, length: int, sampling: SamplingParams, mode: SpeculationMode
) -> Sequence:
    """Make a sequence with a synthetic prompt, and a lease whose slots differ from the token indices."""
    vocab = runner.decoder.config.vocab_size
    request = GenerationRequest(
        "x", [(5 * i + 3) % vocab for i in range(length)], 4, sampling, SpeculationLimits().resolve(mode)
    )
    sequence = Sequence(request, Collector(), session_id=1, page_size=PAGE_SIZE, follow=True)
    runner.pool.lease(9)
    sequence.lease = runner.pool.lease(length + 8)
    return sequence


def prefill(runner: ModelRunner, sequence: Sequence, cuts: list[int]) -> list[int]:
    """Prefill a prompt in chunks and return the chosen tokens."""
    pairs = itertools.pairwise([0, *cuts, sequence.committed_len])
    return [token for start, stop in pairs for token in runner.prefill([PrefillChunk(sequence, start, stop)])]


def check_same(
    plain: ModelRunner,
    padded: ModelRunner,
    length: int,
    cuts: list[int],
    sampling: SamplingParams,
    mode: SpeculationMode,
) -> None:
    """Check that the two runners choose the same token and store the same values."""
    tokens = [
        prefill(runner, make_sequence(runner, length, sampling, mode), cuts) for runner in (plain, padded)
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 1
    for expected, found in zip(plain.pool.planes(), padded.pool.planes(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    stored = bool((padded.pool.planes()[-1] != UNTOUCHED).any())
    assert stored is (mode is SpeculationMode.ON)
