"""gRPC rounds that are enqueued before their states arrive: every message ends the device's wait."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.connection.relay_rig import SIZE, Relay
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.build import build_engine
from outrider.services.draft.peers.peer import Peer
from outrider.services.draft.peers.replies import Reply, StateTaken, TreesReply
from outrider.services.draft.peers.stream_exchange import StreamExchange
from outrider.services.draft.serving.loop import DraftLoop
from outrider.services.draft.serving.protocol import DraftProtocol
from outrider.services.draft.serving.servicer import StreamOutlet
from outrider.services.draft.serving.session_messages import reply_to
from outrider.services.draft.sessions.session import PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.transport.stream_exchange import SOON, TAKEN
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.tensors import InlineTensors
from outrider.shared.spec.resident import HEADER_BYTES, GroupLayout, StateBlob, StateLayout

CPU = torch.device("cpu")
LAYOUT = GroupLayout(struct.Struct("<2i"), columns=2, features_start=384, row_bytes=32, num_bytes=SIZE)
"""The layout of a state of `SIZE` bytes: two sequences with two feature rows each."""


class Outlet:
    """Records the replies of the draft."""

    def __init__(self) -> None:
        self.said: list[Reply] = []

    def send(self, reply: Reply) -> None:
        self.said.append(reply)

    def end(self) -> None: ...


class Draft:
    """The draft's side of a stream: the rounds under test with a fake relay."""

    def __init__(self, ahead: bool = True, compact: bool = False) -> None:
        self.outlet, self.relay = Outlet(), Relay()
        self.peer = Peer(PeerId(1), "t", self.outlet)
        self.exchange = StreamExchange(self.peer, self.relay, ahead=ahead, compact=compact)  # type: ignore[arg-type]
        self.blob, self.trees = torch.zeros(SIZE, dtype=torch.uint8), torch.ones(SIZE, dtype=torch.uint8)
        assert self.exchange.fits(self.blob, self.trees)

    def enqueue(self, number: int, tried: bool = True) -> bool:
        message = draft_pb2.RoundsNext(rounds=1, number=number)
        if not self.exchange.goes_ahead(message, tried):
            return False
        self.take(message)
        self.exchange.send_trees(message, self.trees)
        return True

    def take(self, message: draft_pb2.RoundsNext) -> None:
        state = StateBlob(self.blob, StateLayout([LAYOUT]))
        self.exchange.receive_state(message, state, torch.zeros(1, dtype=torch.int32), 1.0)

    def finish(self, number: int, state: bytes = bytes(SIZE)) -> bool:
        return self.exchange.state_arrived(draft_pb2.RoundState(rounds=1, number=number, state=state))


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
        assert draft.outlet.said[-1] == TreesReply(1, number, bytes([1]) * SIZE)
    assert not draft.exchange.broken


def test_a_sealed_state_starts_the_round_that_waits_and_nothing_else_does(draft: Draft) -> None:
    assert not draft.exchange.finish_sealed(sealed(1)), "no round waits yet"
    assert draft.enqueue(1)
    for message in (
        sealed(2),
        b"",
        draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=1)).SerializeToString(),
    ):
        assert not draft.exchange.finish_sealed(message)
    assert draft.relay.waits == {1}
    assert draft.exchange.finish_sealed(sealed(1))
    assert draft.relay.came == {1: bytes([1]) * SIZE}
    said = draft.outlet.said[-1]
    assert isinstance(said, TreesReply)
    assert said.envelope is not None
    assert said.envelope.seal(said.trees) == reply_to(said).SerializeToString()
    assert not draft.exchange.finish_sealed(sealed(1)), "the round has ended"


def test_a_sealed_state_of_another_size_is_refused_and_releases(draft: Draft) -> None:
    assert draft.enqueue(1)
    with pytest.raises(ProtocolError, match="size"):
        draft.exchange.finish_sealed(sealed(1, SIZE - 1))
    assert not draft.relay.waits


def test_the_gpu_is_called_for_a_state_that_is_waited_for(draft: Draft) -> None:
    draft.exchange.state_coming()
    assert not draft.relay.calls
    assert draft.enqueue(1)
    draft.exchange.state_coming()
    assert draft.relay.calls == 1
    assert draft.relay.waits == {1}


def test_the_target_of_a_state_that_was_announced_hears_that_it_came_before_its_trees(draft: Draft) -> None:
    for number in (1, 2, 3):
        draft.outlet.said.clear()
        assert draft.enqueue(number)
        draft.exchange.state_coming()
        assert draft.exchange.finish_sealed(sealed(number))
        (taken,) = draft.outlet.said
        assert isinstance(taken, StateTaken)
        assert reply_to(taken).WhichOneof("message") == "round_taken"
        assert draft.relay.came[number] == bytes([number]) * SIZE, "the state must reach the device first"
        taken.then()
        assert draft.outlet.said[1:] == [TreesReply(1, number, bytes([1]) * SIZE)]
    draft.outlet.said.clear()
    assert draft.enqueue(4)
    assert draft.exchange.finish_sealed(sealed(4))
    assert draft.outlet.said == [TreesReply(1, 4, bytes([1]) * SIZE)], "not announced: no RoundTaken"


def test_what_follows_the_message_that_a_state_came_is_left_to_its_stream() -> None:
    sent: list[tuple[bytes, Callable[[], None] | None]] = []

    class Stream:
        def send(self, message: bytes, then: Callable[[], None] | None = None) -> None:
            sent.append((message, then))

    def then() -> None: ...

    outlet = StreamOutlet(lambda: None)
    outlet.open(Stream())  # type: ignore[arg-type]
    outlet.send(StateTaken(then))
    assert sent == [(TAKEN, then)]


def test_trees_that_are_owed_are_sent_before_another_round_is_waited_for(draft: Draft) -> None:
    """Otherwise the thread that delivers the next state could block on trees queued after the wait for it."""
    assert draft.enqueue(1)
    draft.exchange.state_coming()
    assert draft.exchange.finish_sealed(sealed(1))
    assert draft.enqueue(2)
    taken, trees = draft.outlet.said
    assert trees == TreesReply(1, 1, bytes([1]) * SIZE)
    assert isinstance(taken, StateTaken)
    taken.then()
    assert len(draft.outlet.said) == 2, "the trees must be sent only once"
    assert draft.relay.waits == {2}
    assert draft.exchange.finish_sealed(sealed(2)), "the second round must still wait for its state"


def test_the_message_that_a_state_comes_soon_calls_the_gpu(draft: Draft, tmp_path: Path) -> None:
    target = make_toy_target(tmp_path / "target", vocab_size=40, hidden_size=32)
    values = {
        "draft": make_toy_eagle3(tmp_path / "head", target),
        "target_weights": target,
        "device": "cpu",
        "kv_tokens": 512,
    }
    protocol = DraftProtocol(DraftLoop(build_engine(DraftSettings.load(values), CPU, torch.float32)), CPU)
    assert draft.enqueue(1)
    protocol.take(draft.peer, draft_pb2.SessionRequest.FromString(SOON), InlineTensors(), draft.exchange)
    assert draft.relay.calls == 1
    assert draft.relay.waits == {1}


def test_a_state_of_another_round_releases_the_one_that_waits(draft: Draft) -> None:
    assert draft.enqueue(4)
    assert not draft.finish(9)
    assert not draft.relay.waits
    assert not draft.finish(4), "the round has been released"
    assert not draft.outlet.said


def test_a_state_of_another_size_is_refused_and_releases(draft: Draft) -> None:
    assert draft.enqueue(1)
    with pytest.raises(ProtocolError, match="size"):
        draft.finish(1, b"short")
    assert not draft.relay.waits


@pytest.mark.parametrize("tried", [True, False], ids=["ahead", "new"])
def test_compact_states_are_expanded(tried: bool) -> None:
    draft = Draft(compact=True)
    state = bytearray(bytes([7]) * SIZE)
    LAYOUT.counts.pack_into(state, HEADER_BYTES + LAYOUT.counts.size, 1, 2)
    compact = b"".join(StateLayout([LAYOUT]).compact(memoryview(state)))
    assert len(compact) == LAYOUT.features_start + 3 * LAYOUT.row_bytes
    unused = slice(LAYOUT.features_start + LAYOUT.row_bytes, LAYOUT.features_start + 2 * LAYOUT.row_bytes)
    state[unused] = bytes(LAYOUT.row_bytes)
    if draft.enqueue(1, tried):
        assert draft.finish(1, compact)
    else:
        draft.exchange.keep_state(compact)
        draft.take(draft_pb2.RoundsNext(rounds=1, number=1))
    assert draft.relay.came == {1: bytes(state)}
    assert draft.enqueue(2)
    with pytest.raises(ProtocolError, match="bytes; expected"):
        draft.finish(2, compact[:-1])
    assert not draft.relay.waits


def test_a_round_that_failed_half_way_is_released_and_answered(draft: Draft) -> None:
    message = draft_pb2.RoundsNext(rounds=1, number=3)
    assert draft.exchange.goes_ahead(message, True)
    draft.take(message)
    draft.exchange.skip(1, 3)
    assert not draft.relay.waits
    assert draft.outlet.said == [TreesReply(1, 3, b"")]


@pytest.mark.parametrize("number", [0, 2, 1 << 31, (1 << 32) - 1])
def test_numbers_that_no_watch_could_follow_wait_for_nothing(draft: Draft, number: int) -> None:
    assert draft.enqueue(2)
    assert draft.finish(2)
    assert not draft.enqueue(number)
    draft.exchange.skip(1, number)
    assert draft.enqueue(3), "an invalid number must not affect later rounds"
    assert draft.finish(3)


@pytest.mark.parametrize(
    ("ahead", "tried", "room"),
    [(True, False, SIZE), (False, True, SIZE), (True, True, 0)],
    ids=["new", "late", "large"],
)
def test_a_round_may_wait_for_its_state_on_the_host(ahead: bool, tried: bool, room: int) -> None:
    draft = Draft(ahead)
    draft.relay.room = room
    assert draft.exchange.fits(draft.blob, draft.trees)
    assert not draft.enqueue(1, tried=tried)
    assert not draft.finish(1)
    state = bytes([5]) * SIZE
    draft.exchange.keep_state(state)
    message = draft_pb2.RoundsNext(rounds=1, number=1)
    draft.take(message)
    draft.exchange.send_trees(message, draft.trees)
    assert draft.relay.came == {1: state} if room else draft.blob[4:].tolist() == [5] * (SIZE - 4)
    assert not draft.relay.waits
    assert draft.outlet.said == [TreesReply(1, 1, bytes([1]) * SIZE)]


def test_a_draft_whose_driver_cannot_wait_goes_on_without(draft: Draft) -> None:
    draft.relay.fails = True
    with pytest.raises(CudaError):
        draft.enqueue(1)
    assert draft.relay.closed
    draft.exchange.skip(1, 1)
    assert draft.exchange.mend()
    assert draft.exchange.fits(draft.blob, draft.trees)
    assert not draft.enqueue(2)
    draft.exchange.keep_state(bytes([5]) * SIZE)
    message = draft_pb2.RoundsNext(rounds=1, number=2)
    draft.take(message)
    draft.exchange.send_trees(message, draft.trees)
    assert draft.blob[4:].tolist() == [5] * (SIZE - 4)
    assert draft.outlet.said == [TreesReply(1, 1, b""), TreesReply(1, 2, bytes([1]) * SIZE)]


def test_a_malformed_state_of_a_round_that_is_new_is_refused_and_releases(draft: Draft) -> None:
    assert not draft.enqueue(1, tried=False)
    draft.exchange.keep_state(b"short")
    with pytest.raises(ProtocolError, match="size"):
        draft.take(draft_pb2.RoundsNext(rounds=1, number=1))
    assert not draft.relay.waits


def test_a_target_that_has_gone_leaves_nothing_waiting(draft: Draft) -> None:
    assert draft.enqueue(1)
    draft.exchange.close()
    assert not draft.relay.waits
    assert not draft.exchange.mend()
