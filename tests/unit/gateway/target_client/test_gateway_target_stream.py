"""The stream of one sequence: order of events, pausing at the byte limit, aborting for a slow reader."""

from __future__ import annotations

import asyncio

import pytest

from outrider.services.gateway.request import TargetDelta, TargetFinish, Usage
from outrider.services.gateway.target_client.client import Readiness
from outrider.services.gateway.target_client.stream import ReaderLimits, TargetStream
from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.base.generation import FinishReason, SpeculationReport
from outrider.target.v1 import target_pb2

FINISH = TargetFinish(FinishReason.STOP, None, Usage(1, 1), SpeculationReport())


class Outlet:
    """Records the messages that a stream sends to the target."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.forgotten: list[str] = []

    def send(self, message: target_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        assert kind
        assert getattr(message, kind).request_id == "r"
        self.sent.append(kind)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def make(max_unread_bytes: int = 100, timeout_s: float = 60.0) -> tuple[TargetStream, Outlet]:
    outlet = Outlet()
    return TargetStream("r", outlet, ReaderLimits(max_unread_bytes, timeout_s)), outlet


async def test_events_come_in_order_and_nothing_after_the_end() -> None:
    stream, outlet = make()
    for token in (1, 2):
        stream.deliver(TargetDelta((token,)), 1)
    stream.deliver(FINISH, 1)
    stream.deliver(TargetDelta((3,)), 1)
    assert [await stream.next() for _ in range(3)] == [TargetDelta((1,)), TargetDelta((2,)), FINISH]
    stream.close()
    # The sequence ended by itself, so there is nothing to cancel.
    assert (outlet.sent, outlet.forgotten) == ([], ["r"])


async def test_an_error_is_raised_where_it_happened() -> None:
    stream, _ = make()
    stream.deliver(TargetDelta((1,)), 1)
    stream.deliver(UnavailableError("lost"), 0)
    await stream.next()
    with pytest.raises(UnavailableError):
        await stream.next()


async def test_it_pauses_above_the_limit_and_resumes_below_a_quarter() -> None:
    stream, outlet = make(max_unread_bytes=100)
    for token in range(10):
        stream.deliver(TargetDelta((token,)), 20)
    assert outlet.sent == ["pause"]
    for _ in range(8):
        await stream.next()
    assert outlet.sent == ["pause"]
    await stream.next()
    assert outlet.sent == ["pause", "resume"]
    for token in range(6):
        stream.deliver(TargetDelta((token,)), 20)
    assert outlet.sent == ["pause", "resume", "pause"]
    stream.close()
    assert outlet.sent[-1] == "cancel"


async def test_a_reader_that_reads_nothing_is_given_up_and_the_buffer_dropped() -> None:
    stream, outlet = make(timeout_s=0.0)
    for token in range(10):
        stream.deliver(TargetDelta((token,)), 20)
    await stream._loop.run_in_executor(None, lambda: None)
    with pytest.raises(OutriderError) as caught:
        await stream.next()
    assert caught.value.reason == "slow_reader"
    assert outlet.sent == ["pause", "cancel"]
    stream.close()
    assert outlet.sent == ["pause", "cancel"]


async def test_a_reader_that_reads_nothing_is_given_up_after_the_end_of_the_sequence_too() -> None:
    stream, outlet = make(timeout_s=0.0)
    for token in range(10):
        stream.deliver(TargetDelta((token,)), 20)
    stream.deliver(FINISH, 1)
    await stream._loop.run_in_executor(None, lambda: None)
    with pytest.raises(OutriderError) as caught:
        await asyncio.wait_for(stream.next(), 5)
    assert caught.value.reason == "slow_reader"
    assert outlet.sent == ["pause"]


async def test_closing_twice_cancels_once() -> None:
    stream, outlet = make()
    stream.close()
    stream.close()
    assert outlet.sent == ["cancel"]


async def test_readiness_can_be_awaited_both_ways() -> None:
    readiness = Readiness()
    await readiness.wait_for(False)
    readiness.set(True)
    await readiness.wait_for(True)
    assert readiness
    readiness.set(False)
    assert not readiness
