"""The drafter in another process: opens sessions, sends commits, requests trees and processes replies.

This module is the engine's side of the draft protocol. Only the engine thread runs it.

A session is *live* once its Open message was sent over the current connection. A frame is one message for
several sessions. Commits of live sessions are collected and sent in the next frame. The engine opens a
session again if the session falls too far behind, or if the draft has lost it. The engine then sends the
stored feature rows of the session again.

A fault of the draft raises no exception. The affected sequences decode without drafts and report a fallback
reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.answer_wait import AnswerWait
from outrider.services.target.draft_client.breaker import Breaker, BreakerState
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.deadlines import AnswerDeadlines
from outrider.services.target.draft_client.link import DraftLink, TargetIdentity, WeightReader
from outrider.services.target.draft_client.remote_slots import RemoteSlots
from outrider.services.target.draft_client.session import DraftSession, send_frame
from outrider.services.target.draft_client.transport.create import carrier_of
from outrider.services.target.draft_client.trees import draft_can_grow
from outrider.shared.base.errors import OutriderError, ProtocolError
from outrider.shared.rpc.address import IpcAddress
from outrider.shared.spec.drafter import (
    AWAITED,
    BACKING_OFF,
    Commits,
    Drafter,
    DrafterState,
    DraftRoute,
    FeatureSpec,
    ProposalRequest,
    ProposalRow,
    SequenceOpen,
)
from outrider.shared.spec.tree import DraftBatch
from outrider.shared.spec.trees import HostTree, pad_trees

HOST = torch.device("cpu")
"""Trees are built on the host. The verify pass uploads the trees with its other inputs."""
MAX_PENDING_TOKENS = 256
"""Limit for a session's pending tokens. Above this limit, all pending tokens are sent without a request for a
tree. If there is no connection, the session is lost instead."""
BAD_TREES_TO_TRIP = 3
"""Number of invalid trees in a row that make the draft faulty."""
FAULTS_TO_RECONNECT = 3
"""Number of consecutive faults after which to reconnect, because the connection may be in a damaged state."""
NO_DEADLINE_US = 0
REJECTED_FOR_S = 5.0
"""Seconds until a session that the draft refused is offered again, if the refusal does not name a time."""

_log = logging.getLogger("outrider.target.draft")


class RemoteDrafter(Drafter):
    """A drafter in another process. Engine thread only, except for `state`, `describe` and `refusal`.

    Args:
        address: The draft service's address.
        identity: Describes this target in the handshake.
        weight: Function that returns a weight tensor of the target, for drafts that borrow the target's
            weights.
        device: The target's device.
        fault_deadline_s: Seconds after which an outstanding answer makes the draft faulty.
        on_device: Whether round states and trees may stay on the devices, or must pass through the host.
    """

    def __init__(
        self,
        address: str,
        identity: TargetIdentity,
        weight: WeightReader,
        device: torch.device,
        *,
        fault_deadline_s: float = 2.0,
        on_device: bool = False,
    ) -> None:
        self._identity = identity
        self._transport = "grpc" if IpcAddress.parse(address, "draft") is None else "ipc"
        self._deadlines = AnswerDeadlines(fault_deadline_s)
        self._breaker = Breaker(fault_deadline_s)
        carriers = carrier_of(address, device, on_device)
        self._link = DraftLink(address, identity, weight, self._breaker, carriers)
        self._connection: Connection | None = None
        self._hello = draft_pb2.HelloAck()
        self._spec: FeatureSpec | None = None
        self._sessions: dict[int, DraftSession] = {}
        self.slots: RemoteSlots = RemoteSlots(
            device,
            identity.vocab_size,
            identity.feature_dtype,
            self._sessions,
            self._deadlines,
            self._breaker,
            self._take_reply,
            self._fault,
        )
        self._announced: ProposalRequest | None = None
        self._draft_ms = 0.0
        self._bad_trees = 0
        self._answers = AnswerWait(
            self._deadlines, self._breaker, lambda: self._connection, self._take_reply, self._fault
        )
        self._link.start()

    # ---- any thread

    def state(self) -> DrafterState:
        if self._link.connection is None:
            return DrafterState.DOWN if self._link.ever_connected else DrafterState.CONNECTING
        open_state = DrafterState.DOWN if self._breaker.refuses_all else DrafterState.LATE
        return open_state if self._breaker.state is BreakerState.OPEN else DrafterState.ON

    @property
    def backing_off(self) -> bool:
        return self._link.connection is not None and self._breaker.refuses_all

    def refusal(self) -> OutriderError | None:
        """Return why draft and target do not match; None if they match or the draft has not answered."""
        return self._link.refusal

    def describe(self) -> tuple[str, str]:
        """Return the draft's algorithm and model id, or two empty strings before the first connection."""
        return self._hello.algorithm, self._hello.model_id

    def route(self) -> DraftRoute:
        connection = self._link.connection
        agreed = None if connection is None else connection.agreed
        names = () if agreed is None else tuple(one.name.lower() for one in sorted(agreed.features))
        began_s = None if connection is None else connection.draft_began_s
        uptime_s = None if began_s is None else time.monotonic() - began_s
        return DraftRoute(self._transport, names, uptime_s, self._link.connections_lost)

    # ---- engine thread

    def feature_spec(self) -> FeatureSpec | None:
        """Return the features to capture. This method processes messages too, because every step calls it."""
        self._drain()
        return self._spec

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        if not self._sessions:
            self._breaker.resume(time.monotonic())
        for sequence in sequences:
            self.slots.left([sequence.fence.session_id])
            former = self._sessions.get(sequence.fence.session_id)
            session = self._sessions[sequence.fence.session_id] = DraftSession(sequence.fence, former)
            if (connection := self._usable()) is None:
                session.lost = True
            else:
                session.begin(connection, sequence)

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Send the feature rows of a prompt, or keep the rows until the draft has opened the session."""
        session = self._sessions.get(session_id)
        if session is not None and session.live and not session.acked:
            self._drain()
        connection = self._usable()
        if session is None or not session.live:
            return
        if connection is None:
            session.lose()
            return
        session.send_rows(connection, self._identity.target_id, base, rows)

    def commit(self, result: Commits) -> None:
        """Keep commits until the next frame, and send prompt rows that the device has finished."""
        self._drain()
        for commit in result.commits:
            session = self._sessions.get(commit.fence.session_id)
            if session is None or not session.live:
                continue
            session.add(commit)
            if len(session.token_ids) > MAX_PENDING_TOKENS:
                if (connection := self._usable()) is None:
                    session.lose()
                else:
                    self.slots.flush()
                    session.send_unasked(connection, result.round)

    def announce(self, request: ProposalRequest) -> None:
        """Request trees in one frame, which also contains the pending commits of all requested rows."""
        # 1. Process messages first, because they may make a row obsolete or report a lost session.
        self._announced = request
        self._drain()
        connection = self._usable()
        frame = draft_pb2.TargetFrame(round=request.round)
        features: list[torch.Tensor] = []
        deadline_us = NO_DEADLINE_US if request.deadline_s is None else int(request.deadline_s * 1e6)

        # 2. Add a request for each row that can be drafted now. For the other rows, record why they cannot.
        asked = 0
        for row in request.rows:
            session = self._sessions.get(row.fence.session_id)
            if session is None:
                continue
            if session.wanted == row and connection is not None:
                asked += 1  # an earlier round has requested the same tree
                continue
            session.tree, session.wanted = None, None
            session.reason = self._obstacle(session, row, connection, asked)
            if session.reason:
                continue
            asked += 1
            now = time.monotonic()
            if not session.warm:
                self._deadlines.asked(now)
            row_deadline_us = NO_DEADLINE_US if row.must_wait else deadline_us
            frame.commits.append(session.take_request(row, row_deadline_us, features, now))

        # 3. Send the frame.
        if connection is not None and frame.commits:
            self.slots.flush()
            send_frame(connection, frame, features)

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """Wait as `AnswerWait` describes, and return one tree per row."""
        # 1. Announce the request, unless the engine has already announced it.
        if self._announced is not request:
            self.announce(request)
        self._announced = None

        # 2. Wait for the trees that have not arrived.
        rows = [(row, self._sessions.get(row.fence.session_id)) for row in request.rows]
        awaited = [
            (row, session)
            for row, session in rows
            if session is not None and session.wanted is not None and session.tree is None
        ]
        in_time = not awaited or self._answers.run(awaited, request)
        if in_time and any(session is not None and session.tree is not None for _row, session in rows):
            self._breaker.success(time.monotonic())

        # 3. Collect the trees. A row without a tree gets a single-node tree, and its own tree may arrive
        # later.
        trees: list[HostTree] = []
        for row, session in rows:
            tree = session.tree if session is not None else None
            if session is not None and session.reason != AWAITED:
                session.tree, session.wanted = None, None
            trees.append(tree or HostTree.of_root(row.root_token))
        return pad_trees(trees, HOST, self._draft_ms)

    def wants_reopen(self) -> Sequence[int]:
        """Return the lost sessions, except those refused recently. Return none without a connection."""
        if self._usable() is None:
            return ()
        now, sessions = time.monotonic(), self._sessions.items()
        return [number for number, session in sessions if session.lost and session.rejected_until <= now]

    def fallback_reason(self, session_id: int) -> str:
        return self._sessions[session_id].reason if session_id in self._sessions else "not_followed"

    def close(self, session_ids: Sequence[int]) -> None:
        self.slots.left(session_ids)
        for session_id in session_ids:
            session = self._sessions.pop(session_id, None)
            if session is not None and session.live and self._connection is not None:
                self._connection.send(draft_pb2.SessionRequest(close=draft_pb2.Close(session_id=session_id)))
        if not self._sessions:
            self._breaker.pause(time.monotonic())

    def saved(self, seconds: float) -> None:
        self._breaker.budget.earn(seconds, time.monotonic())

    def shutdown(self) -> None:
        self._link.close()

    # ---- messages

    def _take_reply(self, connection: Connection, timeout_s: float) -> bool:
        """Wait for one message and process the message. Return False if the connection has ended."""
        reply = connection.receive(timeout_s)
        if reply is not None:
            self._handle(connection, reply)
        elif connection.ended.is_set() and connection is self._connection:
            self._go_over(None)
        return not connection.ended.is_set()

    def _fault(self, waited_s: float = 0.0) -> None:
        """Stop requests to a faulty draft for a while. Reconnect after several faults in a row."""
        self._breaker.trip(time.monotonic(), waited_s)
        self._deadlines.owed_s = None
        if self._breaker.faults % FAULTS_TO_RECONNECT == 0 and self._connection is not None:
            _log.warning("%d faults of the draft in a row; reconnecting", self._breaker.faults)
            self._connection.close()

    def _drain(self) -> None:
        """Switch to the link's current connection and process all messages that have arrived."""
        connection = self._link.connection
        if connection is not None and connection.ended.is_set():
            connection = None
        if connection is not self._connection:
            self._go_over(connection)
        while connection is not None and (reply := connection.receive(0.0)) is not None:
            self._handle(connection, reply)

    def _handle(self, connection: Connection, reply: draft_pb2.SessionReply) -> None:
        self._deadlines.heard(time.monotonic())
        try:
            self._reply(reply)
        except ProtocolError as error:
            _log.warning("the draft violated the protocol: %s", error.message)
            connection.close()

    def _go_over(self, connection: Connection | None) -> None:
        """Switch to another connection or to none. The sessions of the previous connection are lost."""
        self._connection = connection
        if connection is not None:
            assert connection.hello is not None
            self._hello = connection.hello
            self._spec = connection.spec
            self._bad_trees = 0
            self._deadlines.owed_s = None
        for session in self._sessions.values():
            session.lose("draft_down" if connection is None else "resync")
        if connection is None:
            self.slots.lost()
        else:
            self.slots.connected(connection)

    def _reply(self, reply: draft_pb2.SessionReply) -> None:
        kind = reply.WhichOneof("message")
        if kind == "open":
            self._opened(reply.open)
        elif kind == "frame":
            self._draft_ms = reply.frame.draft_ms
            for tree in reply.frame.trees:
                self._take_tree(tree)
        elif kind == "need_resync":
            session = self._sessions.get(reply.need_resync.session_id)
            if session is not None and session.fence.epoch == reply.need_resync.epoch:
                session.lose("resync")
        elif kind == "reject":
            session = self._sessions.get(reply.reject.session_id)
            if session is not None:
                retry_s = reply.reject.retry_after_ms / 1e3 or REJECTED_FOR_S
                session.reject(reply.reject.reason, time.monotonic() + retry_s)
        elif kind in ("slots_opened", "slot_ready", "rounds_ended"):
            self.slots.hear(reply)
        elif kind == "hello":
            raise ProtocolError("the draft sent a second Hello", field="hello")

    def _opened(self, ack: draft_pb2.OpenAck) -> None:
        session, connection = self._sessions.get(ack.session_id), self._connection
        if session is not None and connection is not None and session.is_opened_by(ack):
            session.opened(connection, self._identity.target_id, ack.have_len)

    def _take_tree(self, tree: draft_pb2.Tree) -> None:
        """Keep a tree that answers the current request. Drop late, repeated and outdated trees."""
        session = self._sessions.get(tree.fence.session_id)
        if session is None or not session.live or session.fence.epoch != tree.fence.epoch:
            return
        self._deadlines.answered(session, time.monotonic())
        try:
            if session.take_tree(tree, self._identity.vocab_size):
                self._bad_trees = 0
        except ProtocolError as error:
            self._bad_trees += 1
            _log.warning("dropped an invalid tree of the draft: %s", error.message)
            if self._bad_trees >= BAD_TREES_TO_TRIP:
                self._bad_trees = 0
                self._fault()

    # ---- helpers

    def _usable(self) -> Connection | None:
        """Return the connection, unless the draft is faulty."""
        return None if self._breaker.refuses_all else self._connection

    def _obstacle(
        self, session: DraftSession, row: ProposalRow, connection: Connection | None, asked: int
    ) -> str:
        """Return the reason why no tree can be requested for a row now, or an empty string."""
        if connection is None:
            return BACKING_OFF if self.backing_off else DrafterState.DOWN.value
        if not session.live:
            return session.reason or "resync"
        refusal = self._breaker.refuses(must_wait=row.must_wait, is_first=not asked)
        if refusal:
            return refusal
        if not draft_can_grow(row.shape, self._hello):
            return "shape_above_draft"
        if session.fence != row.fence:
            session.lose()
            return "resync"
        return ""
