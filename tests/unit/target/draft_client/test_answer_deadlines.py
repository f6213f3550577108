"""The target's time limits for a silent draft, with a clock that advances only while the target waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client import answer_wait
from outrider.services.target.draft_client import remote_drafter as remote
from outrider.services.target.draft_client.breaker import Breaker, BreakerState
from outrider.services.target.draft_client.fences import fence_to_proto
from outrider.services.target.draft_client.link import TargetIdentity, Weight
from outrider.services.target.draft_client.remote_drafter import FAULTS_TO_RECONNECT, RemoteDrafter
from outrider.services.target.draft_client.transport.carrier import Carrier
from outrider.shared.spec.drafter import Commit, Commits, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftShape

FAULT_S = 2.0
CAP_S = 0.01
ROUND_S = 0.005
SHAPE = DraftShape(3, 1, 4)


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Quiet:
    """A connection that returns the queued replies. Waiting for more advances the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ended = threading.Event()
        self.carrier = SimpleNamespace(rows_follow_open=True, rounds=None, rows_behind=False)
        self.hello = draft_pb2.HelloAck(max_steps=8, max_topk=8, max_nodes=64)
        self.spec = None
        self.last_sign_s = 0.0
        self.waited_s = 0.0
        self.replies: deque[draft_pb2.SessionReply] = deque()
        self.frames = 0

    def send(self, message: draft_pb2.SessionRequest) -> None:
        self.frames += message.HasField("frame")

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        if self.replies:
            return self.replies.popleft()
        self.clock.now += timeout_s
        self.waited_s += timeout_s
        return None

    def close(self) -> None:
        self.ended.set()


class Link:
    """A `DraftLink` whose connection the test supplies."""

    ever_connected, refusal = True, None

    def __init__(
        self,
        address: str,
        identity: TargetIdentity,
        weight: Weight,
        breaker: Breaker,
        make: Callable[[], Carrier],
    ) -> None:
        self.connection: Quiet | None = None
        self.breaker = breaker

    def start(self) -> None:
        pass


class Target:
    """Drives a drafter round by round. Each round emits one token, whatever was proposed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(remote, "time", self.clock)
        monkeypatch.setattr(answer_wait, "time", self.clock)
        monkeypatch.setattr(remote, "DraftLink", Link)
        identity = TargetIdentity("t", "f", 64, 8, 2, torch.float32)
        self.drafter = RemoteDrafter(
            "unix:/x", identity, lambda name: torch.zeros(1), torch.device("cpu"), fault_deadline_s=FAULT_S
        )
        link: object = self.drafter._link
        assert isinstance(link, Link)
        self.link: Link = link
        self.connection = Quiet(self.clock)
        link.connection = self.connection
        self.drafter.feature_spec()  # adopts the connection
        self.fences: dict[int, Fence] = {}

    def open(self, session_id: int, epoch: int = 1) -> None:
        fence = self.fences[session_id] = Fence(session_id, epoch, 4, 0)
        self.drafter.open([SequenceOpen(fence, [1, 2, 3, 4], 0, 0.0)])

    def round(self, *, must_wait: bool = False, answer: bool = False) -> list[int]:
        """Run one round of all sequences and return the number of nodes of each tree."""
        for session_id, fence in self.fences.items():
            after = self.fences[session_id] = Fence(
                session_id, fence.epoch, fence.committed_len + 1, fence.committed_len
            )
            self.drafter.commit(Commits(1, [Commit(after, fence.committed_len, [7], None)]))
        rows = [ProposalRow(fence, 7, SHAPE, must_wait=must_wait) for fence in self.fences.values()]
        request = ProposalRequest(1, rows, None if must_wait else CAP_S)
        self.drafter.announce(request)
        if answer:
            for row in rows:
                self.say(row.fence)
        batch = self.drafter.propose(request)
        self.clock.now += ROUND_S
        return [int(nodes) for nodes in batch.num_nodes]

    def say(self, fence: Fence) -> None:
        tree = draft_pb2.Tree(fence=fence_to_proto(fence), token_ids=[5, 6], parents=[0, 1])
        self.connection.replies.append(draft_pb2.SessionReply(frame=draft_pb2.DraftFrame(trees=[tree])))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    return Target(monkeypatch)


def test_a_stopped_draft_is_waited_for_once_by_each_new_request(target: Target) -> None:
    for session_id in range(3):
        target.open(session_id)
        for _round in range(100):
            target.round()
    assert target.connection.frames == 300
    assert target.connection.waited_s == pytest.approx(3 * CAP_S)


def test_a_stopped_draft_is_found_faulty_though_nobody_waits(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    target.open(1)
    while target.clock.now < 100.0 + FAULT_S:
        assert target.link.breaker.state is BreakerState.CLOSED
        target.round()
    target.round()
    assert target.link.breaker.refuses_all
    assert "has owed an answer" in caplog.text
    frames = target.connection.frames
    for _round in range(100):
        target.round()
    assert target.connection.frames == frames, "a faulty draft receives nothing"
    assert target.connection.waited_s <= CAP_S + 1e-9


def test_requests_shorter_than_the_fault_deadline_find_a_stopped_draft_faulty_too(target: Target) -> None:
    """Otherwise each round would send another request, and requests would pile up."""
    for session_id in range(8):
        target.open(session_id)
        for _round in range(100):
            target.round()
        del target.fences[session_id]
        target.drafter.close([session_id])
    assert target.link.breaker.refuses_all
    assert target.connection.frames < (FAULT_S + 3 * CAP_S) / ROUND_S
    assert target.connection.waited_s <= 8 * CAP_S + 1e-9


def test_a_slow_opening_is_not_waited_for_and_drafting_begins_behind_it(target: Target) -> None:
    target.open(1)
    for _round in range(50):
        assert target.round() == [1]
    target.say(target.fences[1])  # an old round's answer: the draft has computed the prompt
    target.round()
    waited = target.connection.waited_s
    assert waited <= 2 * CAP_S + 1e-9
    assert target.round(answer=True) == [3]
    target.round()
    assert target.connection.waited_s > waited, "the next round waits again, as long as that pays off"


def test_an_opening_that_takes_long_while_the_draft_lives_is_no_fault(target: Target) -> None:
    target.open(1)
    while target.clock.now < 100.0 + 4 * FAULT_S:
        target.round()
        target.connection.last_sign_s = target.clock.now
    assert target.link.breaker.state is BreakerState.CLOSED
    assert target.connection.waited_s <= CAP_S + 1e-9


def test_an_answer_that_was_there_already_closes_the_breaker(target: Target) -> None:
    target.open(1)
    target.link.breaker.trip(0.0)
    target.link.breaker.sign_of_life(target.clock.now)
    assert not target.link.breaker.refuses_all
    target.open(1, epoch=2)
    assert target.round(answer=True) == [3]
    assert target.link.breaker.state is BreakerState.CLOSED
    assert target.link.breaker.faults == 0


def test_faults_in_a_row_end_the_connection(target: Target) -> None:
    for fault in range(FAULTS_TO_RECONNECT):
        assert not target.connection.ended.is_set()
        target.open(1, epoch=fault + 1)
        target.round(must_wait=True)
        target.clock.now += 100.0
        target.link.breaker.sign_of_life(target.clock.now)
    assert target.connection.ended.is_set()
    assert target.link.breaker.faults == FAULTS_TO_RECONNECT
