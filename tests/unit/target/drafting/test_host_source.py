"""Trees through the host: announced early, collected among changed batches, measured; late commits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine.slot_sequences import seated_sequence
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    generate_plain,
    make_harness,
    oracle_plan,
    trees_to_batch,
)
from support.suite.compute_device import DEVICE

from outrider.services.target.drafting import host_source
from outrider.services.target.drafting.host_source import CATCH_UP_TOKENS, HostSource
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.policy.controller import EntryBound, SpeculationController
from outrider.services.target.request import Event
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState, ProposalRequest, SequenceOpen
from outrider.shared.spec.tree import NO_DRAFT, DraftBatch, DraftShape

PROMPTS = [[3, 5, 7], [2, 4, 6, 8], [9, 1]]
NEW_TOKENS = 30
SHAPE = (3, 2, 7)


class Listening(FakeDrafter):
    """Records the order of calls."""

    def __init__(self, answers: Sequence[Sequence[int]], vocab_size: int, log: list[str]) -> None:
        super().__init__(oracle_plan(answers, vocab_size, 0.7))
        self.log = log
        self.asked: list[ProposalRequest] = []
        self.epochs: dict[int, int] = {}

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        super().open(sequences)
        self.epochs.update({one.fence.session_id: one.fence.epoch for one in sequences})

    def announce(self, request: ProposalRequest) -> None:
        self.log.append("announce")
        self.asked.append(request)

    def propose(self, request: ProposalRequest) -> DraftBatch:
        self.log.append("propose")
        for row in request.rows:
            assert row.fence.epoch == self.epochs[row.fence.session_id], "a request must be of this epoch"
        return super().propose(request)


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    return [generate_plain(decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS) for prompt in PROMPTS]


def followed(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, **options: int
) -> tuple[Harness, Listening]:
    log: list[str] = []
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    drafter = Listening(answers, decoder.config.vocab_size, log)
    harness = make_harness(decoder, drafter, plan=plan, **options)
    deliver = harness.sink.deliver

    def told(events: Sequence[Event]) -> None:
        log.append("deliver")
        deliver(events)

    harness.sink.deliver = told  # type: ignore[method-assign]
    return harness, drafter


def test_the_next_round_is_announced_before_the_last_is_delivered(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan
) -> None:
    harness, drafter = followed(decoder, plain, plan)
    harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    harness.run()
    assert harness.sink.tokens["0"] == plain[0]
    rounds = drafter.log.count("propose")
    assert drafter.log.count("announce") == rounds, "each round must be announced once"
    first = drafter.log.index("propose")
    assert drafter.log[first : first + 4] == ["propose", "announce", "deliver", "propose"]
    assert [request.round for request in drafter.asked] == sorted(
        {request.round for request in drafter.asked}
    )


@pytest.mark.parametrize("act", ["cancel", "pause"])
@pytest.mark.parametrize("steps", range(2, 9))
def test_a_sequence_that_leaves_after_the_announcement(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, act: str, steps: int
) -> None:
    harness, drafter = followed(decoder, plain, plan)
    handles = [
        harness.submit(prompt, NEW_TOKENS, request_id=str(i), shape=SHAPE) for i, prompt in enumerate(PROMPTS)
    ]
    for _ in range(steps):
        harness.step()
    getattr(harness.engine, act)(handles[1])
    for _ in range(3):
        harness.step()
    if act == "pause":
        harness.engine.resume(handles[1])
    harness.run()
    for index in (0, 1, 2) if act == "pause" else (0, 2):
        assert harness.sink.tokens[str(index)] == plain[index]
    assert not harness.sink.failed
    assert not drafter.sequences


def test_a_sequence_that_joins_is_drafted_from_its_second_round_on(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan
) -> None:
    harness, drafter = followed(decoder, plain, plan)
    harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    for _ in range(3):
        harness.step()
    harness.submit(PROMPTS[1], NEW_TOKENS, request_id="1", shape=SHAPE)
    harness.submit(PROMPTS[2], NEW_TOKENS, request_id="2", mode=SpeculationMode.OFF)
    harness.run()
    for index in range(3):
        assert harness.sink.tokens[str(index)] == plain[index]
    assert max(len(request.rows) for request in drafter.asked) == 2
    assert harness.sink.finished["1"].speculation.accept_length > 1.3
    assert harness.sink.finished["2"].speculation.draft_tokens == 0


def test_plain_rounds_run_ahead_while_a_draft_elsewhere_is_not_wanted(decoder: Decoder) -> None:
    answer = generate_plain(decoder, NoDrafter(decoder.device), PROMPTS[0], 400)
    whole = PROMPTS[0] + answer
    drafter = Listening([whole], decoder.config.vocab_size, [])
    harness = make_harness(decoder, drafter, plan=LoopPlan(lookahead=1))
    choices = itertools.count(1)
    wanted = DraftShape(2, 1, 3)

    def choose(entries: Sequence[EntryBound], *_: object) -> list[DraftShape]:
        return [wanted if next(choices) % 150 == 0 else NO_DRAFT]

    harness.engine.controller.choose = choose  # type: ignore[method-assign]
    harness.submit(PROMPTS[0], 400, request_id="0", mode=SpeculationMode.AUTO, shape=(3, 2, 7))
    ahead, told, most_untold = 0, [], 0
    while harness.engine.has_work():
        harness.step()
        ahead += harness.engine.on_device
        if drafter.sequences:
            told = next(iter(drafter.sequences.values()))
            assert told == whole[: len(told)]
            given = len(PROMPTS[0]) + len(harness.sink.tokens.get("0", []))
            most_untold = max(most_untold, given - len(told))
    assert harness.sink.tokens["0"] == answer
    assert ahead > len(answer) - 20, "plain rounds must be launched before the previous one is read"
    assert [request.rows[0].shape for request in drafter.asked] == [wanted] * 2, (
        "a choice to draft must be carried out, though the round waits for an earlier one"
    )
    assert most_untold == CATCH_UP_TOKENS - 1, "the drafter must receive plain rounds' tokens regularly"
    assert not drafter.sequences


def fallbacks(harness: Harness, reason: str) -> float:
    text = harness.engine.prometheus_text()
    found = re.search(rf'draft_fallback_total{{reason="{reason}"}} ([0-9.]+)', text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("state", [DrafterState.DOWN, DrafterState.ON])
def test_a_sequence_chooses_once_a_round_and_counts_a_fallback_once(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, state: DrafterState
) -> None:
    harness, drafter = followed(decoder, plain, plan)
    drafter.current_state = state
    choices = [0, 0, 0]

    def choose(entries: Sequence[EntryBound], *_: object) -> list[DraftShape]:
        for entry in entries:
            choices[states.index(entry.state)] += 1
        return [DraftShape(2, 1, 3) if sum(choices) % 5 == 0 else NO_DRAFT for _ in entries]

    harness.engine.controller.choose = choose  # type: ignore[method-assign]
    states: list[Any] = []
    new_state = harness.engine.controller.new_state
    harness.engine.controller.new_state = lambda *_: (states.append(new_state()), states[-1])[1]  # type: ignore[method-assign]
    for index, prompt in enumerate(PROMPTS):
        harness.submit(prompt, NEW_TOKENS, request_id=str(index), mode=SpeculationMode.AUTO)
        for _ in range(4):  # the next one joins the rounds of the others
            harness.step()
    harness.run()
    reports = [harness.sink.finished[str(index)].speculation for index in range(3)]
    rounds = [report.rounds for report in reports]
    for index in range(3):
        assert harness.sink.tokens[str(index)] == plain[index]
    if state is DrafterState.DOWN:
        assert (fallbacks(harness, state.value), sum(choices)) == (sum(rounds), 0)
    else:
        assert drafter.log.count("propose") > 1
        # `choose` is not called for an entry that joins after the trees of a round were requested.
        assert all(count - 1 <= choice <= count for choice, count in zip(choices, rounds, strict=True))


@pytest.mark.parametrize("state", [DrafterState.DOWN, DrafterState.ON])
def test_every_round_without_a_draft_has_a_reason(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, state: DrafterState
) -> None:
    harness, drafter = followed(decoder, plain, plan)
    drafter.current_state = state
    for index, prompt in enumerate(PROMPTS):
        harness.submit(prompt, NEW_TOKENS, request_id=str(index), shape=SHAPE, trace=True)
        for _ in range(4):  # the next one joins the rounds of the others
            harness.step()
    harness.run()
    rounds = [one for index in range(3) for one in harness.sink.rounds[str(index)]]
    reasons = {one.reason for one in rounds if len(one.nodes) == 1}
    if state is DrafterState.DOWN:
        assert reasons == {"draft_down"}
    else:
        assert reasons <= {"joined"}
        assert {one.reason for one in rounds if len(one.nodes) > 1} == {""}


def test_a_session_that_is_opened_again_leaves_the_announcement(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan
) -> None:
    harness, drafter = followed(decoder, plain, plan)
    handles = [
        harness.submit(prompt, NEW_TOKENS, request_id=str(index), shape=SHAPE)
        for index, prompt in enumerate(PROMPTS)
    ]
    for step in range(9):
        harness.step()
        if step > 2:
            drafter.lost = [handles[step % 3]]
    harness.run()
    assert drafter.opens > 6
    for index in range(3):
        assert harness.sink.tokens[str(index)] == plain[index]


@pytest.mark.parametrize("steps", [2, 3, 5, 7])
def test_a_paused_sequence_that_is_retracted_comes_back(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, steps: int
) -> None:
    harness, drafter = followed(decoder, plain, plan, num_pages=11, page_size=4)
    first = harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    for _ in range(steps):
        harness.step()
    harness.engine.pause(first)
    harness.submit(PROMPTS[1], 25, request_id="1", shape=SHAPE)
    while "1" not in harness.sink.finished:
        harness.step()
    assert harness.scheduler.num_retractions > 0
    harness.engine.resume(first)
    harness.run()
    assert harness.sink.tokens["0"] == plain[0]
    assert harness.sink.tokens["1"] == plain[1][:25]
    assert not harness.sink.failed
    assert not drafter.sequences


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_sequence_lost_right_after_its_prompt_goes_on(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, steps: int
) -> None:
    """It has a first token then, but has taken part in no round yet."""
    harness, drafter = followed(decoder, plain, plan)
    harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    for _ in range(steps):
        harness.step()
    second = harness.submit(PROMPTS[1], NEW_TOKENS, request_id="1", shape=SHAPE)
    harness.step()
    harness.engine.pause(second)
    drafter.lost = [second]
    for _ in range(3):
        harness.step()
    harness.engine.resume(second)
    harness.run()
    assert not harness.sink.failed
    for index in range(2):
        assert harness.sink.tokens[str(index)] == plain[index]


CAP_S = 0.01


class Clock:
    """A clock that advances only while trees are awaited."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Answering:
    """A drafter that answers after a time, or says why not."""

    def __init__(self, clock: Clock, nodes: int, wait_s: float, reason: str) -> None:
        self.clock, self.nodes, self.wait_s, self.reason = clock, nodes, wait_s, reason

    def announce(self, request: ProposalRequest) -> None:
        self.clock.now += 1.0

    def propose(self, request: ProposalRequest) -> DraftBatch:
        self.clock.now += self.wait_s
        nodes = [(index, index) for index in range(self.nodes - 1)]
        trees = trees_to_batch([(row.root_token, nodes) for row in request.rows])
        return replace(trees, draft_ms=7.0)

    def fallback_reason(self, session_id: int) -> str:
        return self.reason


@pytest.mark.parametrize(
    ("nodes", "wait_s", "reason", "measured"),
    [
        (3, 0.0, "", True),
        (3, CAP_S / 2, "", True),
        (1, 0.0, "warming", False),
        (1, 0.0, "draft_down", False),
        (1, CAP_S, "late", True),
        (1, 0.0, "empty_tree", True),
    ],
)
def test_a_proposal_that_is_owed_teaches_no_cost(
    monkeypatch: pytest.MonkeyPatch, nodes: int, wait_s: float, reason: str, measured: bool
) -> None:
    """Otherwise the controller would learn that an absent draft is fast, and hardly wait for it."""
    clock = Clock()
    monkeypatch.setattr(host_source, "time", clock)
    controller = SpeculationController()
    monkeypatch.setattr(controller, "wait_cap_s", lambda entries, batch_size: CAP_S)
    fell_back: list[str] = []
    planner: Any = SimpleNamespace(fell_back=lambda sequence, why: fell_back.append(why))
    drafter: Any = Answering(clock, nodes, wait_s, reason)
    nothing: Any = None
    source = HostSource(drafter, nothing, planner, nothing, controller, nothing)
    sequence = seated_sequence(KVPool(64, 4, 1, 1, 2, torch.float32, DEVICE), 1, 0)
    sequence.controller_state = controller.new_state()
    prepared = source.prepare([Entry(sequence, 1, DraftShape(3, 2, 7))])
    assert not prepared.may_run_ahead
    assert (prepared.enqueue is not None) == (nodes > 1)
    (entry,) = prepared.entries
    assert entry.shape == (DraftShape(2, 2, 3) if nodes > 1 else NO_DRAFT), "the shape of the answer counts"
    assert fell_back == ([] if nodes > 1 else [reason])
    wait = source.take_wait()
    assert source.take_wait() is None, "a wait counts for one round"
    assert controller.costs.num_answers == measured
    if measured:
        assert wait is not None
        assert (wait.wait_s, wait.answer_s) == (pytest.approx(wait_s), pytest.approx(1.0 + wait_s))
        assert (list(wait.requested), wait.draft_s) == ([DraftShape(3, 2, 7)], 0.007)
    else:
        assert wait is None


def test_a_failed_step_leaves_no_measured_wait_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, controller = Clock(), SpeculationController()
    monkeypatch.setattr(host_source, "time", clock)
    drafter: Any = Answering(clock, 3, 0.0, "")
    nothing: Any = None
    source = HostSource(drafter, nothing, nothing, nothing, controller, nothing)
    sequence = seated_sequence(KVPool(64, 4, 1, 1, 2, torch.float32, DEVICE), 1, 0)
    source.prepare([Entry(sequence, 1, DraftShape(3, 2, 7))])
    source.abandon()
    assert source.take_wait() is None
