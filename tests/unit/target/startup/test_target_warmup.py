"""Tests the steps of a target before it serves: the parity check and rehearsed prompts."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from support.engine.target_harness import FakeDrafter, Harness, generate_plain, make_harness, random_plan
from support.outputs.parity_faults import FAULTS, planted

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.request import SpeculationLimits
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.startup.parity_check import check_parity
from outrider.services.target.startup.warmup import prompt_rehearsals, warm_up_requests
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64


@pytest.fixture
def harness(decoder: Decoder) -> Harness:
    return make_harness(decoder, FakeDrafter(random_plan(VOCAB)), max_running=4, max_queued=6)


def test_the_parity_check_passes_and_can_fail(harness: Harness) -> None:
    result = check_parity(harness.runner, harness.engine.step_runner)
    assert result is not None
    assert 0 < result.error < result.bound
    assert harness.scheduler.allocator.held_pages == 0
    with planted(harness.runner, FAULTS["no mask"]), pytest.raises(UnavailableError) as failed:
        check_parity(harness.runner, harness.engine.step_runner)
    assert failed.value.reason == "parity_check_failed"
    assert harness.scheduler.allocator.held_pages == 0


def test_the_parity_check_plans_attention_as_rounds_do(harness: Harness, decoder: Decoder) -> None:
    attention = harness.runner.attention
    plan, kinds = attention.plan, set[tuple[object, ...]]()

    def noted(batch: AttentionBatch) -> None:
        if batch.ragged:
            words = None if batch.ancestors is None else batch.ancestors.shape[1]
            kinds.add((words, batch.page_table.data_ptr(), batch.page_table.shape, batch.max_kv_len))
        plan(batch)

    with mock.patch.object(attention, "plan", noted):
        check_parity(harness.runner, harness.engine.step_runner)
        of_check, kinds = kinds, set()
        for index, shape in enumerate([(3, 2, 7), (5, 4, 16), (5, 4, 16), (3, 1, 4)]):
            mode = SpeculationMode.ON if index % 2 else SpeculationMode.OFF
            harness.submit([1, 2, index], 20, request_id=str(index), mode=mode, shape=shape)
        harness.run()
    assert len(kinds) == 2, "rounds with and without trees"
    assert kinds == of_check
    for index in range(4):  # the check leaves nothing behind in the slots
        plain = generate_plain(decoder, NoDrafter(), [1, 2, index], 20)
        assert harness.sink.tokens[str(index)] == plain


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
    for rehearse in prompt_rehearsals(harness.runner):
        rehearse()
    assert passes == [[(0, 7)], [(0, 9), (0, 12)]]
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
    assert [one.args[1] for one in rehearsals] == [(300,), (40, 50), (1,), (10,)], (
        "the pool of 576 tokens has room for neither 2000 tokens nor 300 and 400"
    )  # type: ignore[attr-defined]
    for rehearse in rehearsals:
        rehearse()
    assert len(prompt_rehearsals(make_harness(decoder, NoDrafter()).runner)) == 6
