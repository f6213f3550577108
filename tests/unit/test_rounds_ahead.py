"""Rounds over a gRPC stream that are enqueued before what they need has come: whatever comes, the stream's wait ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.convert import reply_to
from outrider.services.draft.inline_rounds import InlineRounds
from outrider.services.draft.loop import Peer
from outrider.services.draft.replies import Reply, RoundTrees
from outrider.services.draft.session import PeerId
from outrider.services.target.draft_client import stream_rounds
from outrider.services.target.draft_client.stream_rounds import StreamRounds
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.polling import Vigil
from outrider.shared.spec.device import RoundState

SIZE = 512
COLUMNS, WIDTH = 2, 8
STATE_SIZE = 256 + 256 + COLUMNS * WIDTH * 4


class Relay:
    """What a GPU's stream would see: what it was given, and whether it stands still."""

    def __init__(self) -> None:
        self.broken = False
        self.closed = False
        self.fails = False
        self.room = 1 << 20
        self.waits: set[int] = set()
        self.blobs: dict[int, bytes] = {}
        self.came: dict[int, bytes] = {}
        self.calls = 0

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return state.nbytes <= self.room

    def give(self, number: int, blob: torch.Tensor) -> None:
        self.blobs[number] = bytes(blob.numpy())

    def take(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        if self.fails:
            raise CudaError("this driver cannot")
        self.waits.add(number)

    def call(self) -> None:
        self.calls += 1

    def given(self, number: int) -> bool:
        return number in self.blobs

    def settle(self, number: int, num_bytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.blobs[number][:num_bytes], dtype=np.uint8)

    def put(self, number: int, data: bytes) -> None:
        if len(data) != SIZE:
            raise ProtocolError("of another size", field="rounds")
        self.came[number] = data
        self.waits.remove(number)

    def release(self, number: int) -> None:
        self.waits.discard(number)

    def mend(self) -> bool:
        return not self.waits

    def close(self) -> None:
        self.closed = self.broken = True
        self.waits.clear()


class Stream:
    """A stream whose other end is the test: `answers` are called with what was sent last, and return a message or nothing."""

    def __init__(self) -> None:
        self.sent: list[draft_pb2.SessionRequest] = []
        self.answers: deque[Callable[[draft_pb2.SessionRequest], draft_pb2.SessionReply | None]] = deque()
        self.ended = False
        self.cancelled = False

    def send(self, message: bytes) -> None:
        self.sent.append(draft_pb2.SessionRequest.FromString(message))

    def receive_within(self, seconds: float) -> bytes | None:
        answer = self.answers.popleft()(self.sent[-1]) if self.answers else None
        if answer is None:
            self.ended = True
            return None
        return answer.SerializeToString()

    def poll(self) -> list[bytes]:
        return []

    def cancel(self) -> None:
        self.cancelled = True


class Target:
    """The target's side with a stream and a GPU that are the test's."""

    def __init__(self) -> None:
        self.stream, self.relay = Stream(), Relay()
        self.vigil = Vigil(enabled=False)
        self.channel = StreamRounds(self.stream, self.vigil, self.dispatch, self.relay)  # type: ignore[arg-type]
        self.state = RoundState.idle(1, COLUMNS, WIDTH, torch.float32, "cpu")
        assert self.state.packed is not None
        self.packed = self.state.packed
        assert self.packed.nbytes == STATE_SIZE
        self.state.features.copy_(torch.arange(COLUMNS * WIDTH).view(1, COLUMNS, WIDTH))
        self.state.counts.fill_(COLUMNS)
        self.trees = torch.zeros(SIZE, dtype=torch.uint8)
        self.expected = torch.zeros(1, dtype=torch.int32)

    def dispatch(self, message: bytes) -> None:
        self.channel.arrived(draft_pb2.SessionReply.FromString(message).round_trees)

    def exchange(self, number: int, ahead: bool = True, limit_s: float = 1.0) -> None:
        message = draft_pb2.RoundsNext(rounds=1, number=number)
        self.channel.exchange(message, self.state, self.trees, self.expected, limit_s, ahead)

    def carry(self) -> None:
        self.channel.hand_over()
        self.channel.carry(True)

    def answer(self, data: bytes, number: int | None = None) -> None:
        def of(request: draft_pb2.SessionRequest) -> draft_pb2.SessionReply:
            known = request.round_state.number if number is None else number
            return draft_pb2.SessionReply(round_trees=draft_pb2.RoundTrees(rounds=1, number=known, trees=data))

        self.stream.answers.append(of)


@pytest.fixture
def target() -> Target:
    return Target()


def test_the_state_goes_out_and_the_trees_come_while_the_stream_waits(target: Target) -> None:
    for number in (1, 2, 3):
        target.exchange(number)
        assert target.relay.waits == {number}
        assert target.stream.sent[-1].rounds_next.number == number, "the message goes ahead of the state"
        target.answer(bytes([number]) * SIZE)
        target.carry()
        assert target.stream.sent[-1].round_state.state == bytes(target.packed.numpy())
        assert target.relay.came[number] == bytes([number]) * SIZE
        assert not target.relay.waits
    assert not target.channel.broken


@pytest.mark.parametrize(("count", "ahead"), [(0, True), (1, True), (1, False)])
def test_rows_that_do_not_count_stay_behind(target: Target, count: int, ahead: bool) -> None:
    target.state.counts.fill_(count)
    target.answer(bytes(SIZE))
    target.exchange(1, ahead)
    target.carry()
    sent = target.stream.sent[-1].round_state.state
    assert sent == bytes(target.packed.numpy())[: STATE_SIZE - (COLUMNS - count) * WIDTH * 4]
    assert not target.channel.broken


def test_both_processes_call_the_gpu_in_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_rounds, "MOST_TAKEN_S", 60.0)
    target.vigil.enabled = True
    kinds = []
    for number in (1, 2, 3, 4):
        target.stream.sent.clear()
        target.exchange(number)
        target.answer(bytes(SIZE))
        target.carry()
        assert target.relay.calls == number
        kinds.append([message.WhichOneof("message") for message in target.stream.sent])
    unknown, known = ["rounds_next", "round_state"], ["rounds_next", "round_soon", "round_state"]
    assert kinds == [unknown, unknown, known, known], "once it is known how long a pass takes"
    assert not target.channel.broken


def test_the_gpu_is_called_back_within_the_limit_of_the_trees(target: Target) -> None:
    target.vigil.enabled = True
    target.channel._drafted_s = 60.0
    target.exchange(1, limit_s=0.01)
    started = time.monotonic()
    target.carry()
    assert time.monotonic() - started < 10.0
    assert target.relay.calls == 1
    assert not target.relay.waits


def test_trees_of_earlier_rounds_are_passed_over(target: Target) -> None:
    target.exchange(5)
    target.answer(b"old" * 9, number=4)
    target.answer(bytes(SIZE))
    target.carry()
    assert target.relay.came == {5: bytes(SIZE)}


@pytest.mark.parametrize(("data", "broken"), [(b"", False), (b"short", True), (None, True)], ids=["none", "malformed", "never"])
def test_without_trees_the_stream_is_released(target: Target, data: bytes | None, broken: bool) -> None:
    target.exchange(1)
    if data is not None:
        target.answer(data)
    target.carry()
    assert not target.relay.waits
    assert not target.relay.came
    assert target.channel.broken == broken
    assert target.channel.mend()


def test_what_fails_after_the_wait_was_enqueued_does_not_leave_it_standing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.exchange(1)

    def settle(number: int, num_bytes: int) -> NDArray[np.uint8]:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(target.relay, "settle", settle)
    with pytest.raises(RuntimeError, match="failed"):
        target.channel.hand_over()
    target.channel.carry(False)
    assert not target.relay.waits
    target.carry()  # nothing is left to do


def test_trees_that_nobody_wants_any_more_are_not_waited_for(target: Target) -> None:
    target.exchange(1)
    target.channel.hand_over()
    target.channel.carry(False)
    assert not target.relay.waits
    assert not target.channel.broken
    target.exchange(2)
    target.answer(b"old" * 9, number=1)
    target.answer(bytes(SIZE))
    target.carry()
    assert target.relay.came == {2: bytes(SIZE)}


def test_trees_that_lie_there_when_their_time_is_over_are_taken(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.exchange(1)
    target.answer(bytes(SIZE))
    target.channel.hand_over()
    now = time.monotonic()
    monkeypatch.setattr("outrider.services.target.draft_client.stream_rounds.time.monotonic", lambda: now + 60.0)
    target.channel.carry(True)
    assert target.relay.came == {1: bytes(SIZE)}


def test_a_round_that_is_new_or_too_large_is_not_enqueued_ahead(target: Target) -> None:
    for number, room, ahead in ((1, 1 << 20, False), (2, STATE_SIZE - 1, True)):
        target.relay.room = room
        target.answer(bytes([7]) * SIZE)
        target.exchange(number, ahead)
        assert not target.relay.blobs
        assert target.trees[4:].tolist() == [7] * (SIZE - 4)
        assert target.trees[:4].view(torch.int32).item() == target.expected.item() == number
        target.carry()
    assert len(target.stream.sent) == 4


def test_a_driver_that_cannot_wait_costs_a_round(target: Target) -> None:
    target.relay.fails = True
    target.exchange(1)
    target.carry()
    assert target.channel.broken
    assert target.relay.closed
    assert target.channel.mend()
    target.answer(bytes([7]) * SIZE)
    target.exchange(2)
    assert target.trees[:4].view(torch.int32).item() == target.expected.item() == 2, "without it"
    target.carry()


def test_the_end_of_the_connection_ends_the_wait(target: Target) -> None:
    target.exchange(1)
    target.channel.close()
    assert not target.relay.waits
    target.carry()
    assert not target.channel.mend()


class Outlet:
    """Keeps what the draft says."""

    def __init__(self) -> None:
        self.said: list[Reply] = []

    def send(self, reply: Reply) -> None:
        self.said.append(reply)

    def end(self) -> None: ...


class Draft:
    """The draft's side."""

    def __init__(self, ahead: bool = True) -> None:
        self.outlet, self.relay = Outlet(), Relay()
        self.inlet = InlineRounds(Peer(PeerId(1), "t", self.outlet), self.relay, ahead=ahead)  # type: ignore[arg-type]
        self.blob, self.trees = torch.zeros(SIZE, dtype=torch.uint8), torch.ones(SIZE, dtype=torch.uint8)
        assert self.inlet.fits(self.blob, self.trees)

    def enqueue(self, number: int, tried: bool = True) -> bool:
        message = draft_pb2.RoundsNext(rounds=1, number=number)
        if not self.inlet.goes_ahead(message, tried):
            return False
        self.inlet.take(message, self.blob, torch.zeros(1, dtype=torch.int32), 1.0)
        self.inlet.give(message, self.trees)
        return True

    def finish(self, number: int, state: bytes = bytes(SIZE)) -> bool:
        return self.inlet.finish(draft_pb2.RoundState(rounds=1, number=number, state=state))


def sealed(number: int, size: int = SIZE) -> bytes:
    state = draft_pb2.RoundState(rounds=1, number=number, state=bytes([number]) * size)
    return draft_pb2.SessionRequest(round_state=state).SerializeToString()


@pytest.fixture
def draft() -> Draft:
    return Draft()


def test_a_state_starts_the_round_that_waits_and_its_trees_are_sent(draft: Draft) -> None:
    for number in (1, 2, 3):
        assert draft.enqueue(number)
        assert draft.relay.waits == {number}
        assert draft.finish(number, bytes([number]) * SIZE)
        assert draft.relay.came[number] == bytes([number]) * SIZE
        assert draft.outlet.said[-1] == RoundTrees(1, number, bytes([1]) * SIZE)
    assert not draft.inlet.broken


def test_a_sealed_state_starts_the_round_that_waits_and_nothing_else_does(draft: Draft) -> None:
    assert not draft.inlet.finish_sealed(sealed(1)), "nothing waits"
    assert draft.enqueue(1)
    for message in (sealed(2), b"", draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=1)).SerializeToString()):
        assert not draft.inlet.finish_sealed(message)
    assert draft.relay.waits == {1}
    assert draft.inlet.finish_sealed(sealed(1))
    assert draft.relay.came == {1: bytes([1]) * SIZE}
    said = draft.outlet.said[-1]
    assert isinstance(said, RoundTrees)
    assert said.envelope is not None
    assert said.envelope.seal(said.trees) == reply_to(said).SerializeToString()
    assert not draft.inlet.finish_sealed(sealed(1)), "it is over"


def test_a_sealed_state_of_another_size_is_refused_and_releases(draft: Draft) -> None:
    assert draft.enqueue(1)
    with pytest.raises(ProtocolError, match="size"):
        draft.inlet.finish_sealed(sealed(1, SIZE - 1))
    assert not draft.relay.waits


def test_the_gpu_is_called_for_a_state_that_is_waited_for(draft: Draft) -> None:
    draft.inlet.soon()
    assert not draft.relay.calls
    assert draft.enqueue(1)
    draft.inlet.soon()
    assert draft.relay.calls == 1
    assert draft.relay.waits == {1}


def test_a_state_of_another_round_releases_the_one_that_waits(draft: Draft) -> None:
    assert draft.enqueue(4)
    assert not draft.finish(9)
    assert not draft.relay.waits
    assert not draft.finish(4), "it is over"
    assert not draft.outlet.said


def test_a_state_of_another_size_is_refused_and_releases(draft: Draft) -> None:
    assert draft.enqueue(1)
    with pytest.raises(ProtocolError, match="size"):
        draft.finish(1, b"short")
    assert not draft.relay.waits


def test_a_round_that_failed_half_way_is_released_and_answered(draft: Draft) -> None:
    message = draft_pb2.RoundsNext(rounds=1, number=3)
    assert draft.inlet.goes_ahead(message, True)
    draft.inlet.take(message, draft.blob, torch.zeros(1, dtype=torch.int32), 1.0)
    draft.inlet.skip(1, 3)
    assert not draft.relay.waits
    assert draft.outlet.said == [RoundTrees(1, 3, b"")]


@pytest.mark.parametrize("number", [0, 2, 1 << 31, (1 << 32) - 1])
def test_numbers_that_no_watch_could_follow_wait_for_nothing(draft: Draft, number: int) -> None:
    assert draft.enqueue(2)
    assert draft.finish(2)
    assert not draft.enqueue(number)
    draft.inlet.skip(1, number)
    assert draft.enqueue(3), "and harm nothing that follows"
    assert draft.finish(3)


@pytest.mark.parametrize(
    ("ahead", "tried", "room"), [(True, False, SIZE), (False, True, SIZE), (True, True, 0)], ids=["new", "late", "large"]
)
def test_a_round_may_wait_for_its_state_on_the_host(ahead: bool, tried: bool, room: int) -> None:
    draft = Draft(ahead)
    draft.relay.room = room
    assert draft.inlet.fits(draft.blob, draft.trees)
    assert not draft.enqueue(1, tried=tried)
    assert not draft.finish(1)
    state = bytes([5]) * SIZE
    draft.inlet.arrived(state)
    message = draft_pb2.RoundsNext(rounds=1, number=1)
    draft.inlet.take(message, draft.blob, torch.zeros(1, dtype=torch.int32), 1.0)
    draft.inlet.give(message, draft.trees)
    assert draft.relay.came == {1: state} if room else draft.blob[4:].tolist() == [5] * (SIZE - 4)
    assert not draft.relay.waits
    assert draft.outlet.said == [RoundTrees(1, 1, bytes([1]) * SIZE)]


def test_a_draft_whose_driver_cannot_wait_goes_on_without(draft: Draft) -> None:
    draft.relay.fails = True
    with pytest.raises(CudaError):
        draft.enqueue(1)
    assert draft.relay.closed
    draft.inlet.skip(1, 1)
    assert draft.inlet.mend()
    assert draft.inlet.fits(draft.blob, draft.trees)
    assert not draft.enqueue(2)
    draft.inlet.arrived(bytes([5]) * SIZE)
    message = draft_pb2.RoundsNext(rounds=1, number=2)
    draft.inlet.take(message, draft.blob, torch.zeros(1, dtype=torch.int32), 1.0)
    draft.inlet.give(message, draft.trees)
    assert draft.blob[4:].tolist() == [5] * (SIZE - 4)
    assert draft.outlet.said == [RoundTrees(1, 1, b""), RoundTrees(1, 2, bytes([1]) * SIZE)]


def test_a_malformed_state_of_a_round_that_is_new_is_refused_and_releases(draft: Draft) -> None:
    assert not draft.enqueue(1, tried=False)
    draft.inlet.arrived(b"short")
    with pytest.raises(ProtocolError, match="size"):
        draft.inlet.take(draft_pb2.RoundsNext(rounds=1, number=1), draft.blob, torch.zeros(1, dtype=torch.int32), 1.0)
    assert not draft.relay.waits


def test_a_target_that_has_gone_leaves_nothing_waiting(draft: Draft) -> None:
    assert draft.enqueue(1)
    draft.inlet.close()
    assert not draft.relay.waits
    assert not draft.inlet.mend()
