"""Rounds by way of the host: the next one is announced before the last one is delivered, and what was announced in vain does no harm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from target_harness import FakeDrafter, Harness, generate_plain, load_toy, make_harness, oracle_plan
from toys import make_toy_target

from outrider.services.target.drafter import NoDrafter
from outrider.services.target.request import Event, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import ProposalRequest
from outrider.shared.spec.tree import DraftBatch

PROMPTS = [[3, 5, 7], [2, 4, 6, 8], [9, 1]]
NEW_TOKENS = 30
SHAPE = (3, 2, 7)


class Listening(FakeDrafter):
    """Notes what happens in which order."""

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


def test_the_next_round_is_announced_before_the_last_is_delivered(decoder: Decoder, plain: list[list[int]]) -> None:
    harness, drafter = followed(decoder, plain)
    harness.submit(PROMPTS[0], NEW_TOKENS, request_id="0", shape=SHAPE)
    harness.run()
    assert harness.sink.tokens["0"] == plain[0]
    rounds = drafter.log.count("propose")
    assert drafter.log.count("announce") == rounds, "each round is asked for once"
    first = drafter.log.index("propose")
    assert drafter.log[first : first + 4] == ["propose", "announce", "deliver", "propose"]
    assert [request.round for request in drafter.asked] == sorted({request.round for request in drafter.asked})


@pytest.mark.parametrize("act", ["cancel", "pause"])
@pytest.mark.parametrize("steps", range(2, 9))
def test_a_sequence_that_leaves_after_the_announcement(decoder: Decoder, plain: list[list[int]], act: str, steps: int) -> None:
    harness, drafter = followed(decoder, plain)
    handles = [harness.submit(prompt, NEW_TOKENS, request_id=str(i), shape=SHAPE) for i, prompt in enumerate(PROMPTS)]
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


def test_a_sequence_that_joins_is_drafted_from_its_second_round_on(decoder: Decoder, plain: list[list[int]]) -> None:
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
