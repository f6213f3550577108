"""Prefills prompts with `ModelRunner`, with and without graphs, and compares the results, on any device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.request import EngineRequest, SpeculationLimits
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.attn.create import create_backend
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec
from support.engine.target_harness import Collector

SIZES = (4, 8, 32)
SLOTS = 4
PAGE_SIZE = 4
UNTOUCHED = 7.0
SAMPLINGS = (
    SamplingParams(0.0),
    SamplingParams(0.9, seed=(1 << 64) - 3, choice_index=2),
    SamplingParams(1.2, top_p=0.7, top_k=9, seed=4),
)


@dataclass(frozen=True)
class Case:
    """Prompts and the passes that prefill them.

    Attributes:
        lengths: Lengths of the prompts.
        passes: The chunks ``(prompt, start, stop)`` of each pass.
    """

    lengths: tuple[int, ...]
    passes: tuple[tuple[tuple[int, int, int], ...], ...]


CASES = (
    Case((1,), (((0, 0, 1),),)),
    Case((4,), (((0, 0, 4),),)),
    Case((32,), (((0, 0, 32),),)),
    Case((31,), (((0, 0, 6),), ((0, 6, 8),), ((0, 8, 31),))),
    Case((5, 9, 1), (((0, 0, 5), (1, 0, 9), (2, 0, 1)),)),
    Case((1, 1, 1, 1), (((0, 0, 1), (3, 0, 1), (1, 0, 1), (2, 0, 1)),)),
    Case((40, 3, 30), (((0, 0, 29), (1, 0, 3)), ((2, 0, 11), (0, 29, 40)), ((2, 11, 30),))),
)


def make_runner(decoder: Decoder, graphs: GraphCache, sizes: tuple[int, ...]) -> ModelRunner:
    """Make a runner that captures features. Every value of its pool is `UNTOUCHED`."""
    pool = decoder.make_pool(320, PAGE_SIZE)
    runner = ModelRunner(
        decoder, pool, create_backend("auto", decoder.device), graphs=graphs, prefill_sizes=sizes
    )
    runner.use_slots(SlotTable(SLOTS, 2, pool, 32, decoder.config.vocab_size))
    runner.set_feature_spec(
        FeatureSpec(aux_layer_ids=(0, 2), feature_size=2 * decoder.config.hidden_size, fingerprint="raw")
    )
    for plane in pool.planes():
        plane.fill_(UNTOUCHED)
    return runner


def make_sequence(
    runner: ModelRunner, index: int, length: int, sampling: SamplingParams, mode: SpeculationMode
) -> Sequence:
    """Make a sequence with a synthetic prompt, a slot, and a lease whose slots differ from token indices."""
    vocab = runner.decoder.config.vocab_size
    prompt = [((5 + index) * i + 3) % vocab for i in range(length)]
    request = EngineRequest("x", prompt, 4, sampling, SpeculationLimits().resolve(mode))
    sequence = Sequence(request, Collector(), session_id=1 + index, page_size=PAGE_SIZE, follow=True)
    runner.pool.lease(9)
    sequence.lease = runner.pool.lease(length + 8)
    sequence.slot = SLOTS - 1 - index
    return sequence


def prefill(
    runner: ModelRunner, case: Case, samplings: Seq[SamplingParams], modes: Seq[SpeculationMode]
) -> list[list[int]]:
    """Prefill the prompts of a case and return the tokens that each pass has chosen."""
    sequences = [
        make_sequence(runner, index, length, samplings[index % len(samplings)], modes[index % len(modes)])
        for index, length in enumerate(case.lengths)
    ]
    return [
        runner.prefill([PrefillChunk(sequences[index], start, stop) for index, start, stop in chunks])
        for chunks in case.passes
    ]


def check_same(
    plain: ModelRunner,
    padded: ModelRunner,
    case: Case,
    samplings: Seq[SamplingParams],
    modes: Seq[SpeculationMode],
) -> None:
    """Check that the two runners choose the same tokens and store the same values."""
    tokens = [prefill(runner, case, samplings, modes) for runner in (plain, padded)]
    assert tokens[0] == tokens[1]
    assert sum(len(chosen) for chosen in tokens[0]) == len(case.lengths)
    for expected, found in zip(plain.pool.planes(), padded.pool.planes(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)
    features = padded.pool.planes()[-1].flatten(0, 1)  # [slots, feature size]
    stored = int((features != UNTOUCHED).any(-1).sum())
    assert stored == sum(
        length
        for index, length in enumerate(case.lengths)
        if modes[index % len(modes)] is not SpeculationMode.OFF
    )
