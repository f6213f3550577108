"""A remote drafter whose connection and clock belong to the test: time passes only while the target waits."""

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
from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.link import TargetIdentity, WeightReader
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.draft_client.transport.carrier import Carrier
from outrider.shared.rpc.fence_messages import fence_to_proto
from outrider.shared.spec.drafter import (
    AWAITED,
    Commit,
    Commits,
    DrafterState,
    ProposalRequest,
    ProposalRow,
    SequenceOpen,
)
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
        self.carrier = SimpleNamespace(rows_follow_open=True, exchange=None)
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


class Pulsing(Quiet):
    """A draft that answers each request after `answer_s`, but is stopped for a part of every period."""

    def __init__(self, clock: Clock, answer_s: float, stopped_s: float, period_s: float) -> None:
        super().__init__(clock)
        self.answer_s, self.stopped_s, self.period_s = answer_s, stopped_s, period_s
        self._due: deque[tuple[float, draft_pb2.SessionReply]] = deque()

    def runs_at(self, now: float) -> float:
        """Return the first time from `now` on at which the draft runs. Each period begins with a run."""
        into = now % self.period_s
        return now if into < self.period_s - self.stopped_s else now - into + self.period_s

    def send(self, message: draft_pb2.SessionRequest) -> None:
        super().send(message)
        begin = max(self.runs_at(self.clock.now), self._due[-1][0] if self._due else 0.0)
        for commit in message.frame.commits:
            tree = draft_pb2.Tree(fence=commit.fence, token_ids=[5, 6], parents=[0, 1])
            reply = draft_pb2.SessionReply(frame=draft_pb2.DraftFrame(trees=[tree]))
            self._due.append((self.runs_at(begin + self.answer_s), reply))

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        if self._due and self._due[0][0] <= self.clock.now + timeout_s:
            at, reply = self._due.popleft()
            self.waited_s += max(0.0, at - self.clock.now)
            self.clock.now = max(self.clock.now, at)
            return reply
        return super().receive(timeout_s)


class Link:
    """A `DraftLink` whose connection the test supplies."""

    ever_connected, refusal = True, None

    def __init__(
        self,
        address: str,
        identity: TargetIdentity,
        weight: WeightReader,
        breaker: Breaker,
        make: Callable[[], Carrier],
    ) -> None:
        self.connection: Quiet | None = None
        self.breaker = breaker

    def start(self) -> None:
        pass


class Target:
    """Drives a drafter round by round. Each round emits one token, whatever was proposed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Callable[[Clock], Quiet] = Quiet) -> None:
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
        self.connection = make(self.clock)
        link.connection = self.connection
        self.drafter.feature_spec()  # adopts the connection
        self.fences: dict[int, Fence] = {}

    def open(self, session_id: int, epoch: int = 1) -> None:
        fence = self.fences[session_id] = Fence(session_id, epoch, 4, 0)
        self.drafter.open([SequenceOpen(fence, [1, 2, 3, 4], 0, 0.0)])

    def round(self, *, must_wait: bool = False, answer: bool = False) -> list[int]:
        """Run one round of all sequences and return the number of nodes of each tree."""
        for session_id in self.fences:
            self.advance(session_id)
        rows = [ProposalRow(fence, 7, SHAPE, must_wait=must_wait) for fence in self.fences.values()]
        request = ProposalRequest(1, rows, None if must_wait else CAP_S)
        self.drafter.announce(request)
        if answer:
            for row in rows:
                self.say(row.fence)
        batch = self.drafter.propose(request)
        while any(self.drafter.fallback_reason(session_id) == AWAITED for session_id in self.fences):
            batch = self.drafter.propose(request)  # no other row runs meanwhile
        self.clock.now += ROUND_S
        return [int(nodes) for nodes in batch.num_nodes]

    def say(self, fence: Fence) -> None:
        tree = draft_pb2.Tree(fence=fence_to_proto(fence), token_ids=[5, 6], parents=[0, 1])
        self.connection.replies.append(draft_pb2.SessionReply(frame=draft_pb2.DraftFrame(trees=[tree])))

    def mixed_round(self, *, on: set[int]) -> set[int]:
        """Run one round with a plain row beside the sequences, as the engine does.

        Returns:
            The sequences that took part. The others await their trees.
        """
        self.drafter.feature_spec()  # processes messages
        if isinstance(self.connection, Pulsing) and self.connection.runs_at(self.clock.now) == self.clock.now:
            self.connection.last_sign_s = self.clock.now
            self.link.breaker.sign_of_life(self.clock.now)
        state = self.drafter.state()
        asking = {
            session_id
            for session_id in self.fences
            if state is DrafterState.ON or (state is DrafterState.LATE and session_id in on)
        }
        rows = [ProposalRow(self.fences[one], 7, SHAPE, must_wait=one in on) for one in sorted(asking)]
        took_part = set(self.fences)
        if rows:
            deadline_s = CAP_S if asking - on else None
            self.drafter.propose(ProposalRequest(1, rows, deadline_s, has_other_rows=True))
            took_part -= {one for one in asking if self.drafter.fallback_reason(one) == AWAITED}
        self.clock.now += ROUND_S
        for session_id in took_part:
            self.advance(session_id)
        return took_part

    def advance(self, session_id: int) -> None:
        """Emit one token of a sequence."""
        fence = self.fences[session_id]
        after = self.fences[session_id] = Fence(
            session_id, fence.epoch, fence.committed_len + 1, fence.committed_len
        )
        self.drafter.commit(Commits(1, [Commit(after, fence.committed_len, [7], None)]))

    def reopen(self) -> None:
        """Open the sessions that the drafter has lost again."""
        for session_id in self.drafter.wants_reopen():
            fence = self.fences[session_id]
            fence = self.fences[session_id] = Fence(session_id, fence.epoch + 1, fence.committed_len, 0)
            self.drafter.open([SequenceOpen(fence, [7] * fence.committed_len, 0, 0.0)])
