"""Tests the steps of a target before it serves: the parity check and rehearsed prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.engine.target_harness import FakeDrafter, Harness, make_harness, random_plan
from support.outputs.parity_faults import FAULTS, planted

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.request import SpeculationLimits
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.startup.parity_check import check_parity
from outrider.services.target.startup.warmup import prompt_rehearsals, warm_up_requests
from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64


@pytest.fixture
def harness(decoder: Decoder) -> Harness:
    return make_harness(decoder, FakeDrafter(random_plan(VOCAB)), max_running=4, max_queued=6)


def test_the_parity_check_passes_and_can_fail(harness: Harness) -> None:
    result = check_parity(harness.runner)
    assert result is not None
    assert 0 < result.error < result.bound
    assert harness.scheduler.allocator.held_pages == 0
    with planted(harness.runner, FAULTS["no mask"]), pytest.raises(UnavailableError) as failed:
        check_parity(harness.runner)
    assert failed.value.reason == "parity_check_failed"
    assert harness.scheduler.allocator.held_pages == 0


def test_the_warm_up_measures_all_shapes_of_auto_where_graphs_do_not_change_their_times() -> None:
    limits = SpeculationLimits(longest_chain=10)
    auto = limits.resolve(SpeculationMode.AUTO)
    shapes = {
        one.speculation.shape
        for one in warm_up_requests(limits, measures_shapes=True)
        if one.speculation.mode is SpeculationMode.ON
    }
    assert shapes == set(offered_shapes(auto.forms, 1))
    assert len(shapes) == 5
    assert sum(one.optional for one in warm_up_requests(limits, measures_shapes=False)) == 0
    modes = {one.speculation.mode for one in warm_up_requests(limits, measures_shapes=False)}
    assert modes == set(SpeculationMode)


def test_rehearsed_prompts_run_and_free_their_pages(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(decoder, NoDrafter(), num_pages=512)
    passes: list[list[tuple[int, int]]] = []
    prefill = harness.runner.prefill

    def noted(chunks: Sequence[PrefillChunk]) -> list[int]:
        passes.append([(chunk.start, chunk.stop) for chunk in chunks])
        return prefill(chunks)

    monkeypatch.setattr(harness.runner, "prefill", noted)
    monkeypatch.setattr("outrider.services.target.startup.warmup.REHEARSED_PROMPTS", ((7,), (9, 12)))
    monkeypatch.setattr("outrider.services.target.startup.warmup.REHEARSED_REMAINDERS", ((40, 3),))
    for rehearse in prompt_rehearsals(harness.runner):
        rehearse()
    assert passes == [[(0, 7)], [(0, 9), (0, 12)], [(37, 40)]]
    monkeypatch.setattr("outrider.services.target.startup.warmup.REHEARSED_REMAINDERS", ())
    monkeypatch.setattr("outrider.services.target.startup.warmup.REHEARSED_PROMPTS", ((9, 8000),))
    (rehearse,) = prompt_rehearsals(harness.runner)
    held = harness.runner.pool.lease(1000)
    assert held is not None
    with pytest.raises(OutriderError, match="too small"):
        rehearse()
    held.release()
    assert harness.scheduler.allocator.held_pages == 0


def test_a_small_pool_rehearses_only_prompts_that_fit(decoder: Decoder) -> None:
    rehearsals = prompt_rehearsals(make_harness(decoder, NoDrafter(), num_pages=36).runner)
    assert [one.args[1] for one in rehearsals] == [((0, 300),), ((0, 40), (0, 50)), ((0, 1),), ((0, 10),)], (
        "the pool of 576 tokens has room for neither 2000 tokens nor 300 and 400"
    )  # type: ignore[attr-defined]
    for rehearse in rehearsals:
        rehearse()
    assert len(prompt_rehearsals(make_harness(decoder, NoDrafter()).runner)) == 9
