"""gRPC rounds that are enqueued before their trees arrive: the device's wait always ends."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.connection.ahead_rig import COLUMNS, STATE_SIZE, WIDTH, Clock, Target, TimedPasses
from support.connection.relay_rig import SIZE

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport import stream_exchange
from outrider.services.target.draft_client.transport.grpc_carrier import GrpcCarrier
from outrider.services.target.draft_client.transport.stream_exchange import TAKEN


@pytest.fixture
def target() -> Target:
    return Target()


def test_the_state_goes_out_and_the_trees_come_while_the_stream_waits(target: Target) -> None:
    for number in (1, 2, 3):
        target.exchange(number)
        assert target.relay.waits == {number}
        assert target.stream.sent[-1].rounds_next.number == number, (
            "the message must be sent before the state"
        )
        target.answer(bytes([number]) * SIZE)
        target.finish()
        assert target.stream.sent[-1].round_state.state == bytes(target.packed.numpy())
        assert target.relay.came[number] == bytes([number]) * SIZE
        assert not target.relay.waits
    assert not target.channel.broken


@pytest.mark.parametrize(("count", "ahead"), [(0, True), (1, True), (1, False)])
def test_rows_that_do_not_count_stay_behind(target: Target, count: int, ahead: bool) -> None:
    target.state.counts.fill_(count)
    target.answer(bytes(SIZE))
    target.exchange(1, ahead)
    target.finish()
    sent = target.stream.sent[-1].round_state.state
    assert sent == bytes(target.packed.numpy())[: STATE_SIZE - (COLUMNS - count) * WIDTH * 4]
    assert not target.channel.broken


def test_both_processes_call_the_gpu_in_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_exchange, "MOST_TAKEN_S", 60.0)
    target.poll_window.enabled = True
    kinds = []
    for number in (1, 2, 3, 4):
        target.stream.sent.clear()
        target.exchange(number)
        target.answer(bytes(SIZE))
        target.finish()
        assert target.relay.calls == number
        kinds.append([message.WhichOneof("message") for message in target.stream.sent])
    unknown, known = ["rounds_next", "round_state"], ["rounds_next", "round_soon", "round_state"]
    assert kinds == [unknown, unknown, known, known], "notices start once the duration of a pass is known"
    assert not target.channel.broken


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stream_exchange, "time", clock)
    monkeypatch.setattr(stream_exchange, "give_way", clock.give_way)
    return clock


def test_the_draft_is_told_shortly_before_the_state_and_the_gpu_called_back_in_the_middle_of_its_pass(
    target: Target, clock: Clock
) -> None:
    passes = TimedPasses(target, clock)
    for number in (1, 2):  # a pass's duration is known from the second round on
        passes.run(number)
        assert passes.soon_at is None
    for number in (3, 4, 5):
        passes.run(number)
        lead_s = stream_exchange.LEAD * stream_exchange.LEAST_TELLING_S
        assert passes.soon_at == pytest.approx(
            passes.enqueued_at + passes.verify_s - lead_s, abs=2 * clock.STEP_S
        )
        assert passes.state_at == pytest.approx(passes.enqueued_at + passes.verify_s, abs=clock.STEP_S)
        assert passes.called_at == pytest.approx(
            passes.state_at + passes.draft_s * stream_exchange.SHARE_OF_DRAFT, abs=2 * clock.STEP_S
        )
    assert not target.channel.broken


@pytest.mark.parametrize(
    ("tell_s", "counts_s"),
    [(0.0, 0.00005), (0.0002, 0.0002), (0.0006, 0.0003)],
    ids=["fast", "slow", "slowest"],
)
def test_the_draft_is_told_earlier_where_telling_takes_longer(
    target: Target, clock: Clock, tell_s: float, counts_s: float
) -> None:
    passes = TimedPasses(target, clock)
    passes.tell_s = tell_s
    for number in range(1, 7):
        passes.run(number)
    lead_s = stream_exchange.LEAD * counts_s
    assert passes.soon_at == pytest.approx(
        passes.enqueued_at + passes.verify_s - lead_s, abs=3 * clock.STEP_S
    )
    assert passes.state_at == pytest.approx(passes.enqueued_at + passes.verify_s, abs=3 * clock.STEP_S), (
        "the notice must not delay the state"
    )


def test_a_pass_that_is_over_sooner_is_announced_at_once(target: Target, clock: Clock) -> None:
    passes = TimedPasses(target, clock)
    for number in (1, 2):
        passes.run(number)
    passes.verify_s = 0.001
    passes.run(3)
    assert (
        passes.soon_at == passes.state_at == pytest.approx(passes.enqueued_at + 0.001, abs=2 * clock.STEP_S)
    )


def test_the_gpu_is_called_back_within_the_limit_of_the_trees(target: Target, clock: Clock) -> None:
    passes = TimedPasses(target, clock)
    passes.draft_s = 0.008
    passes.run(1)
    passes.run(2, limit_s=0.001)
    assert passes.called_at == pytest.approx(passes.state_at + 0.001, abs=2 * clock.STEP_S)


def test_what_takes_too_long_is_not_lain_in_wait_for(target: Target, clock: Clock) -> None:
    passes = TimedPasses(target, clock)
    passes.verify_s = passes.draft_s = 2 * stream_exchange.MOST_TAKEN_S
    for number in (1, 2, 3):
        passes.run(number)
        assert passes.soon_at is None
        assert passes.called_at == passes.state_at


def test_where_waits_sleep_nobody_is_told(target: Target, clock: Clock) -> None:
    passes = TimedPasses(target, clock)
    target.poll_window.enabled = False
    for number in (1, 2, 3):
        passes.run(number)
        assert passes.soon_at is None
        assert passes.called_at is None


def test_that_the_state_came_is_passed_over(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.channel, "_dispatch", None)  # RoundTaken must not reach the carrier
    target.exchange(1)
    target.stream.answers.append(lambda _request: draft_pb2.SessionReply.FromString(TAKEN))
    target.answer(bytes(SIZE))
    target.finish()
    assert target.relay.came == {1: bytes(SIZE)}
    assert not target.channel.broken


def test_that_the_state_came_is_no_reply_to_anything() -> None:
    """RoundTaken may also arrive while no thread waits for trees."""
    carrier = GrpcCarrier("127.0.0.1:1")
    carrier._dispatch(TAKEN)
    assert carrier.receive(0) is None
    carrier._dispatch(
        draft_pb2.SessionReply(rounds_ended=draft_pb2.RoundsEnded(rounds=1)).SerializeToString()
    )
    assert carrier.receive(0) is not None
    carrier.release()


def test_trees_of_earlier_rounds_are_passed_over(target: Target) -> None:
    target.exchange(5)
    target.answer(b"old" * 9, number=4)
    target.answer(bytes(SIZE))
    target.finish()
    assert target.relay.came == {5: bytes(SIZE)}


@pytest.mark.parametrize(
    ("data", "broken"), [(b"", False), (b"short", True), (None, True)], ids=["none", "malformed", "never"]
)
def test_without_trees_the_stream_is_released(target: Target, data: bytes | None, broken: bool) -> None:
    target.exchange(1)
    if data is not None:
        target.answer(data)
    target.finish()
    assert not target.relay.waits
    assert not target.relay.came
    assert target.channel.broken == broken
    assert target.channel.mend()


def test_what_fails_after_the_wait_was_enqueued_does_not_leave_it_standing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.exchange(1)

    def settle(number: int, num_bytes: int) -> NDArray[np.uint8]:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(target.relay, "settle", settle)
    with pytest.raises(RuntimeError, match="failed"):
        target.channel.send_state()
    target.channel.receive_trees(False)
    assert not target.relay.waits
    target.finish()  # must have nothing to do


def test_trees_that_nobody_wants_any_more_are_not_waited_for(target: Target) -> None:
    target.exchange(1)
    target.channel.send_state()
    target.channel.receive_trees(False)
    assert not target.relay.waits
    assert not target.channel.broken
    target.exchange(2)
    target.answer(b"old" * 9, number=1)
    target.answer(bytes(SIZE))
    target.finish()
    assert target.relay.came == {2: bytes(SIZE)}


def test_trees_that_lie_there_when_their_time_is_over_are_taken(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.exchange(1)
    target.answer(bytes(SIZE))
    target.channel.send_state()
    now = time.monotonic()
    monkeypatch.setattr(
        "outrider.services.target.draft_client.transport.stream_exchange.time.monotonic", lambda: now + 60.0
    )
    target.channel.receive_trees(True)
    assert target.relay.came == {1: bytes(SIZE)}


def test_a_round_that_is_new_or_too_large_is_not_enqueued_ahead(target: Target) -> None:
    for number, room, ahead in ((1, 1 << 20, False), (2, STATE_SIZE - 1, True)):
        target.relay.room = room
        target.answer(bytes([7]) * SIZE)
        target.exchange(number, ahead)
        assert not target.relay.blobs
        assert target.trees[4:].tolist() == [7] * (SIZE - 4)
        assert target.trees[:4].view(torch.int32).item() == target.expected.item() == number
        target.finish()
    assert len(target.stream.sent) == 4


def test_a_driver_that_cannot_wait_costs_a_round(target: Target) -> None:
    target.relay.fails = True
    target.exchange(1)
    target.finish()
    assert target.channel.broken
    assert target.relay.closed
    assert target.channel.mend()
    target.answer(bytes([7]) * SIZE)
    target.exchange(2)
    assert target.trees[:4].view(torch.int32).item() == target.expected.item() == 2, (
        "the second exchange must work without the relay"
    )
    target.finish()


def test_the_end_of_the_connection_ends_the_wait(target: Target) -> None:
    target.exchange(1)
    target.channel.close()
    assert not target.relay.waits
    target.finish()
    assert not target.channel.mend()
