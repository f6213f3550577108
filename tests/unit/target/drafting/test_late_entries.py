"""Entries that await their trees: rounds go on without them, and every entry keeps its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    generate_plain,
    make_harness,
    oracle_plan,
)

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import AWAITED, ProposalRequest
from outrider.shared.spec.tree import DraftBatch

PROMPTS = [[3, 5, 7], [2, 4, 6, 8], [9, 1], [11, 2, 6]]
NEW_TOKENS = 30
SHAPE = (3, 2, 7)
NEVER = 10**9


class Withholding(FakeDrafter):
    """Withholds the trees of sessions for a number of rounds.

    Attributes:
        withheld: For each session, the number of further rounds without its trees.
        requests: All requests.
    """

    def __init__(self, answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(oracle_plan(answers, vocab_size, 0.7))
        self.withheld: dict[int, int] = {}
        self.requests: list[ProposalRequest] = []
        self._waiting: set[int] = set()

    def propose(self, request: ProposalRequest) -> DraftBatch:
        self.requests.append(request)
        batch = super().propose(request)
        self._waiting.clear()
        for index, row in enumerate(request.rows):
            session_id = row.fence.session_id
            left = self.withheld.get(session_id, 0)
            if left:
                assert row.must_wait, "only entries of mode `on` may be left out"
                self.withheld[session_id] = left - 1
                self._waiting.add(session_id)
                batch.num_nodes[index] = 1
                batch.depths[index] = 0
        return batch

    def fallback_reason(self, session_id: int) -> str:
        return AWAITED if session_id in self._waiting else "fake"


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    return [generate_plain(decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS) for prompt in PROMPTS]


def withheld(decoder: Decoder, plain: list[list[int]], plan: LoopPlan) -> tuple[Harness, Withholding]:
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    drafter = Withholding(answers, decoder.config.vocab_size)
    return make_harness(decoder, drafter, plan=plan), drafter


def emitted(harness: Harness, request_id: str) -> int:
    return len(harness.sink.tokens.get(request_id, []))


@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.ON, SpeculationMode.AUTO])
def test_other_entries_go_on(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, mode: SpeculationMode
) -> None:
    harness, drafter = withheld(decoder, plain, plan)
    late = harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    harness.submit(PROMPTS[1], NEW_TOKENS, request_id="1", shape=SHAPE, mode=mode)
    for _step in range(4):
        harness.step()
    drafter.withheld[late] = NEVER
    harness.step()
    stands_at = emitted(harness, "0")
    while "1" not in harness.sink.finished:
        harness.step()
    assert emitted(harness, "0") <= stands_at + SHAPE[0] + 1, "one round may have been in flight"
    assert "0" not in harness.sink.finished
    assert harness.sink.tokens["1"] == plain[1]
    drafter.withheld.clear()
    harness.run()
    assert harness.sink.tokens["0"] == plain[0]
    assert harness.sink.finished["0"].speculation.accept_length > 1.0
    assert not drafter.sequences


def test_a_late_entry_asks_for_the_same_tree_again(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan
) -> None:
    harness, drafter = withheld(decoder, plain, plan)
    late = harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    harness.submit(PROMPTS[1], NEW_TOKENS, request_id="1", mode=SpeculationMode.OFF)
    drafter.withheld[late] = 5
    harness.run()
    rows = [row for request in drafter.requests for row in request.rows if row.fence.session_id == late]
    assert rows[:6] == [rows[0]] * 6
    assert rows[6] != rows[0]
    assert drafter.requests[0].has_other_rows
    assert [harness.sink.tokens[str(index)] for index in range(2)] == plain[:2]


def test_a_round_without_other_entries_is_not_launched(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan
) -> None:
    harness, drafter = withheld(decoder, plain, plan)
    late = harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    for _step in range(4):
        harness.step()
    drafter.withheld[late] = NEVER
    for _step in range(3):
        harness.step()
    rounds = harness.engine.stats().rounds
    for _step in range(5):
        harness.step()
        assert harness.engine.has_work()
    assert harness.engine.stats().rounds == rounds
    assert not drafter.requests[-1].has_other_rows
    joined = harness.submit(PROMPTS[1], NEW_TOKENS, request_id="1", shape=SHAPE)
    while "1" not in harness.sink.finished:
        harness.step()
    assert joined not in drafter.withheld
    harness.engine.cancel(late)
    harness.run()
    assert harness.sink.tokens["1"] == plain[1]
    assert not drafter.sequences


@pytest.mark.parametrize("seed", range(6))
def test_late_entries_at_random_change_no_token(
    decoder: Decoder, plain: list[list[int]], plan: LoopPlan, seed: int
) -> None:
    rng = random.Random(seed)
    harness, drafter = withheld(decoder, plain, plan)
    handles: list[int] = []
    modes = [SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF]
    rng.shuffle(modes)
    paused: set[int] = set()
    while len(harness.sink.finished) < len(PROMPTS):
        if len(handles) < len(PROMPTS) and rng.random() < 0.3:
            at = len(handles)
            shape = rng.choice([SHAPE, (2, 1, 3)])
            handles.append(
                harness.submit(PROMPTS[at], NEW_TOKENS, request_id=str(at), shape=shape, mode=modes[at])
            )
        for at, handle in enumerate(handles):
            if modes[at] is SpeculationMode.ON and rng.random() < 0.2:
                drafter.withheld[handle] = rng.randrange(1, 5)
            if handle in paused or rng.random() < 0.05:
                (harness.engine.resume if handle in paused else harness.engine.pause)(handle)
                paused ^= {handle}
        if rng.random() < 0.05:
            drafter.lost.extend(drafter.sequences)
        harness.step()
    assert [harness.sink.tokens[str(index)] for index in range(len(PROMPTS))] == plain
    assert not harness.sink.failed
    harness.run()
    assert not drafter.sequences
