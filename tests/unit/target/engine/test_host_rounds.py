"""Rounds through the host: each is announced before the previous one is delivered; unused announcements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from support.target_harness import FakeDrafter, Harness, generate_plain, load_toy, make_harness, oracle_plan
from support.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.device_loop import CATCH_UP_TOKENS, OverlapPlan
from outrider.services.target.policy.controller import RowBound
from outrider.services.target.request import Event
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import ProposalRequest
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

    def announce(self, request: ProposalRequest) -> None:
        self.log.append("announce")
        self.asked.append(request)

    def propose(self, request: ProposalRequest) -> DraftBatch:
        self.log.append("propose")
        return super().propose(request)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=64, seed=3))


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    return [generate_plain(decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS) for prompt in PROMPTS]


def followed(decoder: Decoder, plain: list[list[int]]) -> tuple[Harness, Listening]:
    log: list[str] = []
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    drafter = Listening(answers, decoder.config.vocab_size, log)
    harness = make_harness(decoder, drafter)
    deliver = harness.sink.deliver

    def told(events: Sequence[Event]) -> None:
        log.append("deliver")
        deliver(events)

    harness.sink.deliver = told  # type: ignore[method-assign]
    return harness, drafter


def test_the_next_round_is_announced_before_the_last_is_delivered(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    harness, drafter = followed(decoder, plain)
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
    decoder: Decoder, plain: list[list[int]], act: str, steps: int
) -> None:
    harness, drafter = followed(decoder, plain)
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
    decoder: Decoder, plain: list[list[int]]
) -> None:
    harness, drafter = followed(decoder, plain)
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


def test_plain_rounds_stay_on_the_device_while_a_draft_elsewhere_is_not_wanted(decoder: Decoder) -> None:
    answer = generate_plain(decoder, NoDrafter(decoder.device), PROMPTS[0], 400)
    whole = PROMPTS[0] + answer
    drafter = Listening([whole], decoder.config.vocab_size, [])
    harness = make_harness(decoder, drafter, overlap=OverlapPlan((1, 2), 4))
    choices = itertools.count(1)
    wanted = DraftShape(2, 1, 3)

    def choose(rows: Sequence[RowBound], batch_size: int, other_nodes: int) -> list[DraftShape]:
        return [wanted if next(choices) % 150 == 0 else NO_DRAFT]

    harness.engine.controller.choose = choose  # type: ignore[method-assign]
    harness.submit(PROMPTS[0], 400, request_id="0", mode=SpeculationMode.AUTO, shape=(3, 2, 7))
    on_device, told = 0, []
    while harness.engine.has_work():
        harness.step()
        on_device += harness.engine.on_device
        if drafter.sequences:
            told = next(iter(drafter.sequences.values()))
            assert told == whole[: len(told)]
    assert harness.sink.tokens["0"] == answer
    assert on_device > len(answer) - 20, "plain rounds must stay on the device"
    assert [request.rows[0].shape for request in drafter.asked] == [wanted] * 2, (
        "a choice to draft must be carried out"
    )
    assert len(told) > len(whole) - CATCH_UP_TOKENS - 10, (
        "the drafter must receive plain rounds' tokens regularly"
    )
    assert not drafter.sequences
