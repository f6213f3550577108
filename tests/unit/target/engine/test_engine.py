"""Single requests in the engine: each request ends by itself, frees its pages and reports correct numbers."""

from __future__ import annotations

import math
import time

import pytest
import torch
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    generate_plain,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.outputs.traces import check_round

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OverloadedError, UnavailableError
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.spec.drafter import DrafterState, FeatureSpec
from outrider.shared.spec.tree import NO_DRAFT

torch.set_num_threads(1)
VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[int]:
    return generate_plain(decoder, NoDrafter(), PROMPT, 60)


@pytest.fixture(params=[0, 1], ids=["read first", "one ahead"])
def harness(decoder: Decoder, request: pytest.FixtureRequest) -> Harness:
    plan = LoopPlan(lookahead=request.param)
    return make_harness(decoder, FakeDrafter(random_plan(VOCAB)), max_running=4, max_queued=6, plan=plan)


def unused(plain: list[int]) -> int:
    """Return a token that does not occur in the plain output."""
    return next(token for token in range(VOCAB) if token not in plain and token not in PROMPT)


def test_cancel_frees_pages_within_two_steps(harness: Harness, plain: list[int]) -> None:
    handle = harness.submit(PROMPT, 60, request_id="a")
    harness.submit(PROMPT, 60, request_id="b")
    for _ in range(5):
        harness.step()
    held = harness.scheduler.allocator.held_pages
    harness.engine.cancel(handle)
    harness.step()
    assert harness.scheduler.allocator.held_pages < held
    harness.run()
    assert harness.sink.finished["a"].reason is FinishReason.CANCELLED
    assert harness.sink.finished["a"].completion_tokens == len(harness.sink.tokens["a"])
    assert harness.sink.tokens["b"] == plain


def test_cancel_at_every_step_leaves_nothing_behind(decoder: Decoder) -> None:
    for step in range(12):
        harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB, step)), prefill_chunk=2)
        handle = harness.submit(PROMPT, 10, request_id="a")
        for _ in range(step):
            if harness.engine.has_work():
                harness.step()
        harness.engine.cancel(handle)
        harness.run()
        assert len(harness.sink.finished) == 1


def test_tokens_after_keep_tokens_are_not_billed(harness: Harness) -> None:
    handle = harness.submit(PROMPT, 60, request_id="a")
    while len(harness.sink.tokens.get("a", ())) < 8:
        harness.step()
    harness.engine.cancel(handle, keep_tokens=5)
    harness.run()
    finished = harness.sink.finished["a"]
    assert (finished.reason, finished.completion_tokens) == (FinishReason.STOP, 5)


def test_a_deadline_ends_one_request_only(harness: Harness, plain: list[int]) -> None:
    harness.submit(PROMPT, 60, request_id="late", deadline=time.monotonic() - 1)
    harness.submit(PROMPT, 60, request_id="b")
    harness.run()
    assert harness.sink.failed["late"].error.code is ErrorCode.DEADLINE_EXCEEDED
    assert harness.sink.tokens["b"] == plain


def test_the_engine_wakes_for_a_deadline_of_a_paused_request(harness: Harness) -> None:
    deadline = time.monotonic() + 0.05
    handle = harness.submit(PROMPT, 60, request_id="a", deadline=deadline)
    harness.step()
    harness.engine.pause(handle)
    harness.run()
    assert not harness.engine.has_work()
    assert harness.engine.next_wakeup() == deadline


def test_a_paused_request_is_skipped_and_goes_on(harness: Harness, plain: list[int]) -> None:
    handle = harness.submit(PROMPT, 60, request_id="a")
    harness.submit(PROMPT, 60, request_id="b")
    for _ in range(3):
        harness.step()
    harness.engine.pause(handle)
    while "b" not in harness.sink.finished:
        harness.step()
    assert len(harness.sink.tokens["a"]) < 60
    harness.engine.resume(handle)
    harness.run()
    assert harness.sink.tokens["a"] == harness.sink.tokens["b"] == plain


def poison_forward(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, plain: list[int]) -> int:
    """Return a token that the plain answer lacks, and after which the decoder's states are not numbers."""
    poison = unused(plain)
    forward = decoder.forward

    def poisoned(tokens: torch.Tensor, *arguments: object) -> DecoderOutput:
        output = forward(tokens, *arguments)  # type: ignore[arg-type]
        output.hidden[tokens == poison] = math.nan
        return output

    monkeypatch.setattr(decoder, "forward", poisoned)
    return poison


def test_not_a_number_fails_one_request_only(
    harness: Harness, decoder: Decoder, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = poison_forward(monkeypatch, decoder, plain)
    harness.submit([1, 2, poison], 60, request_id="bad")
    harness.submit(PROMPT, 60, request_id="good", mode=SpeculationMode.OFF)
    harness.run()
    error = harness.sink.failed["bad"].error
    assert (error.code, error.reason) == (ErrorCode.INTERNAL, "numerical_error")
    assert harness.sink.tokens["good"] == plain
    assert all(not plane.isnan().any() for plane in harness.runner.pool.planes())


def test_a_rejected_node_that_is_not_a_number_harms_nobody(
    decoder: Decoder, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = poison_forward(monkeypatch, decoder, plain)
    harness = make_harness(decoder, FakeDrafter(lambda tokens, row: [(poison, 0), (poison, 1)]))
    harness.submit(PROMPT, 60, request_id="a")
    harness.run()
    assert harness.sink.tokens["a"] == plain


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("out of memory"), ErrorCode.INTERNAL),
        (InvalidRequestError("an internal bug, despite its error type"), ErrorCode.INTERNAL),
        (UnavailableError("rank 1 is lost"), ErrorCode.UNAVAILABLE),
    ],
)
def test_a_failing_step_fails_its_requests_and_the_engine_lives(
    harness: Harness,
    decoder: Decoder,
    plain: list[int],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: ErrorCode,
) -> None:
    harness.submit(PROMPT, 60, request_id="a")
    harness.step()
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", lambda *arguments: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)) as failure:
            harness.engine.step()
        harness.engine.step_failed(failure.value)
    harness.submit(PROMPT, 60, request_id="b")
    harness.run()
    assert harness.sink.failed["a"].error.code is code
    assert harness.sink.tokens["b"] == plain


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "field", "reason"),
    [
        ([], 5, "prompt_ids", "invalid_value"),
        ([1, VOCAB], 5, "prompt_ids", "invalid_value"),
        ([1], 0, "max_new_tokens", "invalid_value"),
        ([1] * 5000, 5, "prompt_ids", "context_length_exceeded"),
        ([1] * 100, 5000, "max_new_tokens", "context_length_exceeded"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    harness: Harness, prompt: list[int], max_new_tokens: int, field: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        harness.submit(prompt, max_new_tokens)
    assert (refused.value.field, refused.value.reason) == (field, reason)
    assert harness.engine.num_live == 0


def test_a_prompt_longer_than_the_pool_is_refused(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter(), num_pages=4, page_size=16)
    with pytest.raises(InvalidRequestError) as refused:
        harness.submit([1] * 60, 10)
    assert refused.value.reason == "context_length_exceeded"
    harness.submit([1] * 53, 10, request_id="fits")
    harness.run()
    assert len(harness.sink.tokens["fits"]) == 10


def test_the_queue_is_bounded_and_says_when_to_come_back(harness: Harness) -> None:
    for _ in range(6):
        harness.submit(PROMPT, 5)
    with pytest.raises(OverloadedError) as refused:
        harness.submit(PROMPT, 5)
    assert refused.value.retry_after_s is not None
    harness.step()
    harness.submit(PROMPT, 5)
    harness.run()


def test_a_draining_engine_finishes_what_it_has(harness: Harness, plain: list[int]) -> None:
    harness.submit(PROMPT, 60, request_id="a")
    harness.engine.draining = True
    with pytest.raises(UnavailableError):
        harness.submit(PROMPT, 5)
    harness.run()
    assert harness.sink.tokens["a"] == plain


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_of_speculation_add_up(decoder: Decoder, plain: list[int], seed: int) -> None:
    harness = make_harness(
        decoder, FakeDrafter(oracle_plan([PROMPT + plain], VOCAB, 0.6, seed)), num_pages=14, page_size=8
    )
    for index in range(3):
        harness.submit(PROMPT, 50, request_id=str(index), shape=(4, 2, 8), trace=True)
    harness.run()
    retractions = harness.scheduler.num_retractions
    prefills = cut = emitted = 0
    for index in range(3):
        report, rounds = harness.sink.finished[str(index)].speculation, harness.sink.rounds[str(index)]
        assert report.rounds == len(rounds) == sum(report.accepted_histogram)
        assert report.draft_tokens == sum(len(one.nodes) - 1 for one in rounds)
        assert report.accepted_tokens == sum(len(one.accepted) for one in rounds)
        assert report.accepted_histogram[-1] > 0
        drafted = [one for one in rounds if len(one.nodes) > 1]
        assert report.accept_length == pytest.approx(
            1 + sum(len(one.accepted) for one in drafted) / len(drafted)
        )
        in_rounds = [token for one in rounds for token in one.emitted]
        tokens_cut = sum(len(one.accepted) + 1 - len(one.emitted) for one in rounds)
        assert (
            sum((k + 1) * count for k, count in enumerate(report.accepted_histogram))
            == len(in_rounds) + tokens_cut
        )
        prefills += 50 - len(in_rounds)
        for one in rounds:
            check_round(one, PROMPT + plain)
        cut += tokens_cut
        emitted += len(in_rounds)
    assert prefills == 3 + retractions, "each prefill must emit one token"


def test_mode_on_executes_exactly_the_shape(decoder: Decoder, plain: list[int]) -> None:
    asked = []

    def plan(tokens: list[int], row: object) -> list[tuple[int, int]]:
        asked.append(row.shape)  # type: ignore[attr-defined]
        return []

    harness = make_harness(decoder, FakeDrafter(plan))
    harness.submit(PROMPT, 20, request_id="a", shape=(3, 2, 7))
    harness.run()
    assert {(shape.depth, shape.topk, shape.max_nodes) for shape in asked} == {(3, 2, 7)}
    assert harness.sink.finished["a"].speculation.fallback_reason == "fake"


def test_the_reason_for_plain_rounds_is_reported(decoder: Decoder) -> None:
    for state in (DrafterState.CONNECTING, DrafterState.DOWN):
        drafter = FakeDrafter(random_plan(VOCAB))
        drafter.current_state = state
        harness = make_harness(decoder, drafter)
        harness.submit(PROMPT, 5, request_id="a")
        harness.run()
        assert harness.sink.finished["a"].speculation.fallback_reason == state.value
    harness = make_harness(decoder, NoDrafter())
    harness.submit(PROMPT, 5, request_id="a")
    harness.submit(PROMPT, 5, request_id="off", mode=SpeculationMode.OFF)
    harness.run()
    assert harness.sink.finished["a"].speculation.fallback_reason == "no_draft"
    assert harness.sink.finished["off"].speculation.fallback_reason == "user"


@pytest.mark.parametrize(
    ("reason", "mode", "shape", "max_new_tokens"),
    [
        ("user", SpeculationMode.OFF, None, 20),
        ("user", SpeculationMode.ON, (3, 2, 1), 20),
        ("length", SpeculationMode.AUTO, None, 2),
        ("controller", SpeculationMode.AUTO, None, 20),
        ("", SpeculationMode.AUTO, None, 1),
        ("", SpeculationMode.ON, None, 20),
    ],
)
def test_plain_rounds_by_choice_say_whose(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    mode: SpeculationMode,
    shape: tuple[int, int, int] | None,
    max_new_tokens: int,
) -> None:
    harness = make_harness(decoder, FakeDrafter(lambda tokens, row: [(1, 0)]))
    monkeypatch.setattr(
        harness.engine.controller, "choose", lambda rows, batch_size, other_nodes: [NO_DRAFT] * len(rows)
    )
    harness.submit(PROMPT, max_new_tokens, request_id="a", mode=mode, shape=shape)
    harness.run()
    report = harness.sink.finished["a"].speculation
    assert report.fallback_reason == reason
    assert (report.rounds > 0) == (max_new_tokens > 1)


def test_sequences_that_the_draft_lost_are_reopened_with_all_rows(decoder: Decoder, plain: list[int]) -> None:
    spec = FeatureSpec(
        aux_layer_ids=(0, 1, 2), feature_size=3 * decoder.config.hidden_size, fingerprint="raw"
    )
    drafter = FakeDrafter(oracle_plan([PROMPT + plain], VOCAB, 0.7), spec)
    harness = make_harness(decoder, drafter)
    handle = harness.submit(PROMPT, 60, request_id="a")
    for _ in range(4):
        harness.step()
    before = torch.stack(drafter.rows[handle])
    drafter.lost = [handle]
    harness.step()
    after = torch.stack(drafter.rows[handle])
    assert drafter.opens == 2
    assert torch.equal(after[: len(before)], before)
    harness.run()
    assert harness.sink.tokens["a"] == plain


def test_a_misfitting_draft_is_not_used(decoder: Decoder, plain: list[int]) -> None:
    spec = FeatureSpec(aux_layer_ids=(1, 99), feature_size=3, fingerprint="wrong")
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB), spec))
    harness.submit(PROMPT, 60, request_id="a")
    harness.run()
    assert harness.sink.tokens["a"] == plain
    assert harness.sink.finished["a"].speculation.fallback_reason == "misfit"


def test_one_delivery_per_step_for_all_requests_of_a_stream(harness: Harness) -> None:
    for _ in range(4):
        harness.submit(PROMPT, 5)
    steps = 0
    while harness.engine.has_work():
        harness.step()
        steps += 1
    assert harness.sink.deliveries <= steps


def test_seeds_matter(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter())
    for seed in range(3):
        harness.submit(PROMPT, 20, request_id=str(seed), sampling=SamplingParams(temperature=1.0, seed=seed))
    harness.run()
    assert len({tuple(tokens) for tokens in harness.sink.tokens.values()}) == 3
