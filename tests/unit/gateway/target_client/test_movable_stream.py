"""A sequence that moves between targets: what the next target gets, and what the client sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.services.gateway.request import (
    GenerationRequest,
    RequestedSpeculation,
    StopRules,
    TargetDelta,
    TargetFinish,
    Usage,
)
from outrider.services.gateway.target_client.member import Member
from outrider.services.gateway.target_client.movable_stream import MovableStream
from outrider.shared.base.errors import InvalidRequestError, UnavailableError
from outrider.shared.base.generation import FinishReason, RoundTrace, SamplingParams, SpeculationReport
from outrider.shared.base.logit_rules import LogprobParams, TokenLogprob
from outrider.shared.base.token_states import StateParams, TokenStates

LOST = UnavailableError("lost", reason="target_lost")
END = TargetFinish(FinishReason.LENGTH, None, Usage(3, 4), SpeculationReport())
EOS, STOP = 1, 7


@dataclass
class PlayedStream:
    """A target's stream that plays events."""

    events: list[Any]
    cancelled: int | None = -1
    closed: bool = False

    async def next(self) -> Any:
        event = self.events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self, keep_tokens: int | None = None) -> None:
        self.cancelled = keep_tokens

    def close(self) -> None:
        self.closed = True


class PlayedClient:
    """A target that plays one stream for each request."""

    def __init__(self, *plays: list[Any]) -> None:
        self.info = SimpleNamespace(eos_token_ids=frozenset([EOS]))
        self.known_info = SimpleNamespace(fingerprint="f", model_id="m", dtype="float32")
        self.address = "target"
        self.connections = 1
        self.requests: list[GenerationRequest] = []
        self.streams: list[PlayedStream] = []
        self._plays = list(plays)

    def submit(self, request: GenerationRequest) -> PlayedStream:
        self.requests.append(request)
        self.streams.append(PlayedStream(self._plays.pop(0)))
        return self.streams[-1]


@dataclass
class Placement:
    """Offers targets in order. Without targets, `on_wait` is called for each wait."""

    members: list[Member] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    on_wait: Any = None

    def choose(self, request: GenerationRequest, key: Any, left: dict[Member, int]) -> Member | None:
        assert key == ("f", "float32")
        found = [one for one in self.members if left.get(one) != one.client.connections]
        return found[0] if found else None

    def patience_s(self) -> float:
        return 60.0 if self.on_wait else 0.0

    async def changed(self) -> None:
        if self.on_wait:
            self.on_wait()

    def moved(self, model: str, reason: str) -> None:
        self.moves.append(reason)

    def forget(self, request_id: str, member: Member | None) -> None:
        self.forgotten.append(request_id)


def member(*plays: list[Any]) -> Member:
    return Member(PlayedClient(*plays))  # type: ignore[arg-type]


def request(max_new_tokens: int = 4, **fields: Any) -> GenerationRequest:
    stop = StopRules(token_ids=frozenset([STOP]))
    return GenerationRequest(
        "r",
        (4, 5, 6),
        max_new_tokens,
        SamplingParams(temperature=0.0),
        RequestedSpeculation(),
        **({"stop": stop, "deadline": math.inf} | fields),
    )


def stream_of(asked: GenerationRequest, *members: Member) -> tuple[MovableStream, Placement]:
    placement = Placement(list(members))
    return MovableStream(asked, placement, members[0]), placement


async def read(stream: MovableStream) -> tuple[list[TargetDelta], TargetFinish]:
    deltas: list[TargetDelta] = []
    while isinstance(event := await stream.next(), TargetDelta):
        deltas.append(event)
    return deltas, event


async def test_the_next_target_reports_the_states_that_are_missing() -> None:
    first = member([TargetDelta((), states=TokenStates(1, 2)), TargetDelta((8,)), LOST])
    second = member([TargetDelta((9,), states=TokenStates(3, 2)), END])
    asked = request(states=StateParams(hidden_states=True, start=1))
    stream, _ = stream_of(asked, first, second)
    deltas, _ = await read(stream)
    assert [one.states for one in deltas] == [TokenStates(1, 2), None, TokenStates(3, 2)]
    assert first.client.requests[0].states.start == 1
    assert second.client.requests[0].states == StateParams(hidden_states=True, start=3)


def ended(cached_tokens: int) -> TargetFinish:
    return TargetFinish(FinishReason.LENGTH, None, Usage(3, 4, cached_tokens), SpeculationReport())


async def test_the_usage_counts_what_the_first_target_had_stored() -> None:
    first = member([TargetDelta((8,), cached_tokens=1), TargetDelta((9,)), LOST])
    second = member([TargetDelta((10,), cached_tokens=2), TargetDelta((11,)), ended(2)])
    stream, _ = stream_of(request(), first, second)
    _, end = await read(stream)
    assert end.usage == Usage(3, 4, 1)


async def test_a_target_that_was_lost_before_the_first_token_does_not_count() -> None:
    stream, _ = stream_of(request(), member([LOST]), member([TargetDelta((8,), cached_tokens=2), ended(2)]))
    _, end = await read(stream)
    assert end.usage.cached_tokens == 2


async def test_a_complete_sequence_that_lost_its_target_keeps_the_count() -> None:
    stream, _ = stream_of(request(1), member([TargetDelta((8,), cached_tokens=2), LOST]))
    _, end = await read(stream)
    assert end.usage == Usage(3, 1, 2)


async def test_the_next_target_gets_what_was_emitted() -> None:
    first = member([TargetDelta((8,)), TargetDelta((9, 10)), LOST])
    second = member([TargetDelta((11,)), END])
    stream, placement = stream_of(request(), first, second)
    deltas, end = await read(stream)
    assert [token for one in deltas for token in one.token_ids] == [8, 9, 10, 11]
    assert end == END
    assert second.client.requests[0].resume_ids == (8, 9, 10)
    assert second.client.requests[0].prompt_ids == (4, 5, 6)
    assert placement.moves == ["target_lost"]
    assert first.client.streams[0].closed
    stream.close()
    stream.close()
    assert placement.forgotten == ["r"]
    assert [(one.load, one.running, one.placed) for one in (first, second)] == [(0, 0, 1), (0, 0, 1)]


async def test_the_work_of_a_target_follows_its_sequences() -> None:
    one = member([TargetDelta((8,)), TargetDelta((9, 10)), END])
    stream, _ = stream_of(request(2000), one)
    assert (one.load, one.running) == (3 + 1024, 1)
    await stream.next()
    assert one.load == 1023
    await stream.next()
    assert one.load == 1021
    stream.close()
    assert (one.load, one.running) == (0, 0)


@pytest.mark.parametrize(
    ("emitted", "max_new_tokens", "reason", "matched"),
    [
        ((8, STOP), 4, FinishReason.STOP, STOP),
        ((8, EOS), 4, FinishReason.STOP, EOS),
        ((8, 9), 2, FinishReason.LENGTH, None),
        ((8, STOP), 2, FinishReason.STOP, STOP),
    ],
)
async def test_a_complete_answer_needs_no_other_target(
    emitted: Sequence[int], max_new_tokens: int, reason: FinishReason, matched: int | None
) -> None:
    """Only the end itself was lost."""
    stream, placement = stream_of(request(max_new_tokens), member([TargetDelta(tuple(emitted)), LOST]))
    _, end = await read(stream)
    assert (end.reason, end.matched_token, end.usage) == (reason, matched, Usage(3, 2))
    assert not placement.moves


async def test_tokens_that_do_not_stop_are_no_end() -> None:
    asked = request(stop=StopRules(ignore_eos=True))
    second = member([TargetDelta((9,)), END])
    stream, _ = stream_of(asked, member([TargetDelta((EOS,)), LOST]), second)
    await read(stream)
    assert second.client.requests[0].resume_ids == (EOS,)


@pytest.mark.parametrize("keep", [None, 1])
async def test_a_cancelled_sequence_does_not_move(keep: int | None) -> None:
    first = member([TargetDelta((8, 9)), LOST])
    stream, placement = stream_of(request(), first, member([]))
    await stream.next()
    stream.cancel(keep)
    assert first.client.streams[0].cancelled == keep
    end = await stream.next()
    assert isinstance(end, TargetFinish)
    assert end.reason is (FinishReason.CANCELLED if keep is None else FinishReason.STOP)
    assert end.usage == Usage(3, 2 if keep is None else keep)
    assert not placement.moves


async def test_a_sequence_may_be_cancelled_between_two_targets() -> None:
    stream, placement = stream_of(request(), member([TargetDelta((8,)), LOST]))
    await stream.next()
    placement.on_wait = stream.cancel
    end = await stream.next()
    assert isinstance(end, TargetFinish)
    assert (end.reason, end.usage) == (FinishReason.CANCELLED, Usage(3, 1))


async def test_without_another_target_the_loss_is_reported() -> None:
    stream, _ = stream_of(request(), member([TargetDelta((8,)), LOST]))
    await stream.next()
    with pytest.raises(UnavailableError, match="lost"):
        await stream.next()


async def test_a_target_that_connects_again_may_be_the_next() -> None:
    only = member([TargetDelta((8,)), LOST], [TargetDelta((9,)), END])
    stream, placement = stream_of(request(), only)

    def reconnect() -> None:
        only.client.connections += 1

    placement.on_wait = reconnect
    deltas, _ = await read(stream)
    assert [one.token_ids for one in deltas] == [(8,), (9,)]


async def test_errors_of_the_request_are_not_retried() -> None:
    stream, placement = stream_of(request(), member([InvalidRequestError("no", field="x")]), member([END]))
    with pytest.raises(InvalidRequestError):
        await stream.next()
    assert not placement.moves


async def test_targets_lost_without_a_token_are_counted_and_refusals_are_not() -> None:
    refusal = UnavailableError("draining")
    lost = [member([LOST]) for _ in range(4)]
    stream, placement = stream_of(request(), member([refusal]), member([refusal]), *lost)
    with pytest.raises(UnavailableError, match="lost"):
        await stream.next()
    assert placement.moves == ["unavailable", "unavailable", "target_lost", "target_lost"]


async def test_a_token_between_two_losses_starts_the_count_again() -> None:
    lost = [member([TargetDelta((8 + at,)), LOST]) for at in range(5)]
    stream, placement = stream_of(request(9), *lost, member([END]))
    deltas, _ = await read(stream)
    assert len(deltas) == len(placement.moves) == 5


@pytest.mark.parametrize(
    ("wanted", "received", "tokens", "then"),
    [
        (LogprobParams(prompt_top=1), 0, (), LogprobParams(prompt_top=1)),
        (LogprobParams(prompt_top=1), 1, (), LogprobParams(prompt_top=1, prompt_start=2)),
        (LogprobParams(prompt_top=1), 2, (), LogprobParams()),
        (LogprobParams(2, 1), 2, (8,), LogprobParams(2)),
        (LogprobParams(2, 1, 2), 1, (8,), LogprobParams(2, None, 2)),
    ],
)
async def test_logprobs_of_the_prompt_come_once(
    wanted: LogprobParams, received: int, tokens: tuple[int, ...], then: LogprobParams
) -> None:
    events = [TargetDelta((), prompt_logprobs=(TokenLogprob(-1.0),) * received)] if received else []
    events += [TargetDelta(tokens, logprobs=(TokenLogprob(-1.0),))] if tokens else []
    second = member([END])
    stream, _ = stream_of(request(logprobs=wanted), member([*events, LOST]), second)
    await read(stream)
    assert second.client.requests[0].logprobs == then


async def test_the_rounds_of_a_trace_are_numbered_through() -> None:
    def traced(number: int, token: int) -> TargetDelta:
        one = RoundTrace(number, 3, (), (), (token,), 0.0, 0.0)
        return TargetDelta((token,), (one,))

    first = member([TargetDelta((8,)), traced(0, 9), traced(1, 10), LOST])
    stream, _ = stream_of(request(9), first, member([TargetDelta((11,)), traced(0, 12), traced(1, 13), END]))
    deltas, _ = await read(stream)
    assert [one.round for delta in deltas for one in delta.rounds] == [0, 1, 2, 3]
