"""The remote drafter: the engine's side of the draft protocol, as a state machine that only the engine thread drives.

A session is *live* once Open went out on the present connection. Commits of live sessions are kept until a frame carries them (they are
cumulative); a session that falls behind too far, or that the draft lost, is reopened by the engine from its feature plane. No fault of
the draft raises: the rows concerned get trees of one node and a reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.breaker import Breaker, BreakerState
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.deadlines import AnswerDeadlines
from outrider.services.target.draft_client.fences import fence_from_proto, fence_to_proto
from outrider.services.target.draft_client.link import DraftLink, TargetIdentity, Weight
from outrider.services.target.draft_client.residency import Residency
from outrider.services.target.draft_client.session import DraftSession, send_frame
from outrider.services.target.draft_client.transport.create import carrier_of
from outrider.services.target.draft_client.trees import check_tree, fits
from outrider.shared.base.errors import OutriderError, ProtocolError
from outrider.shared.spec.drafter import (
    Commits,
    DrafterState,
    FeatureSpec,
    ProposalRequest,
    ProposalRow,
    SequenceOpen,
)
from outrider.shared.spec.resident import ResidentBatch, RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape
from outrider.shared.spec.trees import HostTree, pad_trees

HOST = torch.device("cpu")
"""Where trees are made: the pass that verifies them copies them with all else that it reads."""
MAX_PENDING_TOKENS = 256
"""Commits kept for a session that is not asked for drafts; above, they are sent without asking, or the session is given up."""
BAD_TREES_TO_TRIP = 3
FAULTS_TO_RECONNECT = 3
"""So many in a row without one answer: what the two sides know of each other may be damaged, and a new connection knows nothing."""
NO_DEADLINE_US = 0
FIRST_EPOCH = 1
REJECTED_FOR_S = 5.0
"""How long a session is not offered again after a refusal that names no time."""

_log = logging.getLogger("outrider.target.draft")


class RemoteDrafter:
    """`Drafter` of another process. `state`, `describe` and `refusal` may be called from any thread, the rest from the engine thread.

    Args:
        address: Of the draft.
        identity: Of the target.
        weight: Lends weights of the target.
        device: Of the target.
        fault_deadline_s: A draft that owes an answer for longer is faulty.
        rounds: Keep rounds on the device where the transport can.
    """

    def __init__(
        self,
        address: str,
        identity: TargetIdentity,
        weight: Weight,
        device: torch.device,
        *,
        fault_deadline_s: float = 2.0,
        rounds: bool = False,
    ) -> None:
        self._identity = identity
        self._patience = AnswerDeadlines(fault_deadline_s)
        self._breaker = Breaker(fault_deadline_s)
        self._gate = Residency(device, identity.vocab_size, fault_deadline_s, self._fault)
        self._link = DraftLink(address, identity, weight, self._breaker, carrier_of(address, device, rounds))
        self._connection: Connection | None = None
        self._hello = draft_pb2.HelloAck()
        self._spec: FeatureSpec | None = None
        self._sessions: dict[int, DraftSession] = {}
        self._announced: ProposalRequest | None = None
        self._draft_ms = 0.0
        self._bad_trees = 0
        self._link.start()

    # ---- any thread

    def state(self) -> DrafterState:
        """See `Drafter.state`."""
        if self._link.connection is None:
            return DrafterState.DOWN if self._link.ever_connected else DrafterState.CONNECTING
        return DrafterState.DOWN if self._breaker.refuses_all else DrafterState.ON

    def refusal(self) -> OutriderError | None:
        """Return why the draft cannot be used with this target, if it said so."""
        return self._link.refusal

    def describe(self) -> tuple[str, str]:
        """Return the draft's algorithm and model id; empty before the first connection."""
        return self._hello.algorithm, self._hello.model_id

    # ---- engine thread

    def feature_spec(self) -> FeatureSpec | None:
        """See `Drafter.feature_spec`. Called every step, so this is also where messages are taken in."""
        self._drain()
        return self._spec

    @property
    def device_resident(self) -> bool:
        """See `Drafter.device_resident`; comes and goes with the connection."""
        connection = self._connection
        return (
            connection is not None
            and self._breaker.state is BreakerState.CLOSED
            and self._gate.is_open(connection)
        )

    def enter(self, session_ids: Sequence[int], shape: DraftShape, state: RoundState) -> ResidentBatch | None:
        """See `DeviceDrafter.enter`."""
        self._drain()
        connection = self._usable()
        found = [self._sessions.get(session_id) for session_id in session_ids]
        sessions = [
            session
            for session in found
            if session is not None and session.can_enter(state.columns, state.features.shape[2])
        ]
        if (
            connection is None
            or not self.device_resident
            or len(sessions) < len(found)
            or not fits(shape, self._hello)
        ):
            return None
        return self._gate.enter(connection, sessions, shape, state, self._take_reply)

    def rounds_for_capture(self, shape: DraftShape, state: RoundState) -> ResidentBatch:
        """See `DeviceDrafter.rounds_for_capture`."""
        return self._gate.for_capture(self._usable(), shape, state)

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """See `Drafter.open`."""
        for sequence in sequences:
            session = self._sessions[sequence.fence.session_id] = DraftSession(sequence.fence)
            connection = self._usable()
            if connection is None:
                session.lost = True
                continue
            message = draft_pb2.Open(
                fence=fence_to_proto(sequence.fence),
                token_ids=sequence.token_ids,
                seed=sequence.seed,
                temperature=sequence.temperature,
                choice_index=sequence.choice_index,
            )
            connection.send(draft_pb2.SessionRequest(open=message))
            session.live = True
            # Of a sequence that it has followed before the draft may have kept rows: its answer says so.
            session.acked = connection.carrier.rows_follow_open and sequence.fence.epoch == FIRST_EPOCH

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """See `Drafter.features`: they travel once the draft has taken the session up."""
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
        """See `Drafter.commit`. Kept until the next frame; rows of prompts that are computed by now are sent."""
        self._drain()
        for commit in result.commits:
            session = self._sessions.get(commit.fence.session_id)
            if session is None or not session.live:
                continue
            session.fence = commit.fence
            session.token_ids.extend(commit.token_ids)
            if commit.features is not None:
                session.features.append(commit.features)
            if len(session.token_ids) > MAX_PENDING_TOKENS:
                connection = self._usable()
                if connection is None:
                    session.lose()
                else:
                    session.send_unasked(connection, result.round)

    def announce(self, request: ProposalRequest) -> None:
        """See `Drafter.announce`: one frame with every commit that its rows need."""
        self._announced = request
        self._drain()
        connection = self._usable()
        frame = draft_pb2.TargetFrame(round=request.round)
        features: list[torch.Tensor] = []
        deadline_us = NO_DEADLINE_US if request.deadline_s is None else int(request.deadline_s * 1e6)
        asked = 0
        for row in request.rows:
            session = self._sessions.get(row.fence.session_id)
            if session is None:
                continue
            session.tree, session.wanted = None, None
            session.reason = self._obstacle(session, row, connection, asked)
            if session.reason:
                continue
            asked += 1
            session.wanted = row
            if not session.warm:
                self._patience.asked(time.monotonic())
            commit = session.take_commit(features)
            commit.shape.CopyFrom(
                draft_pb2.Shape(depth=row.shape.depth, topk=row.shape.topk, max_nodes=row.shape.max_nodes)
            )
            commit.deadline_us = NO_DEADLINE_US if row.must_wait else deadline_us
            commit.want = draft_pb2.WANT_DRAFT
            frame.commits.append(commit)
        if connection is not None and frame.commits:
            send_frame(connection, frame, features)

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """See `Drafter.propose`."""
        if self._announced is not request:
            self.announce(request)
        self._announced = None
        rows = [(row, self._sessions.get(row.fence.session_id)) for row in request.rows]
        awaited = [
            (row, session)
            for row, session in rows
            if session is not None and session.wanted is not None and session.tree is None
        ]
        in_time = not awaited or self._wait(awaited, request.deadline_s)
        if in_time and any(session is not None and session.tree is not None for _row, session in rows):
            self._breaker.success()
        trees: list[HostTree] = []
        for row, session in rows:
            tree = session.tree if session is not None else None
            if session is not None:
                session.tree, session.wanted = None, None
            trees.append(tree or HostTree.of_root(row.root_token))
        return pad_trees(trees, HOST, self._draft_ms)

    def wants_reopen(self) -> Sequence[int]:
        """See `Drafter.wants_reopen`; nothing while the draft is away."""
        if self._usable() is None:
            return ()
        now = time.monotonic()
        return [
            session_id
            for session_id, session in self._sessions.items()
            if session.lost and session.rejected_until <= now
        ]

    def fallback_reason(self, session_id: int) -> str:
        """See `Drafter.fallback_reason`."""
        session = self._sessions.get(session_id)
        return session.reason if session is not None else "not_followed"

    def close(self, session_ids: Sequence[int]) -> None:
        """See `Drafter.close`."""
        for session_id in session_ids:
            session = self._sessions.pop(session_id, None)
            if session is not None and session.live and self._connection is not None:
                self._connection.send(draft_pb2.SessionRequest(close=draft_pb2.Close(session_id=session_id)))

    def shutdown(self) -> None:
        """See `Drafter.shutdown`."""
        self._link.close()

    # ---- waiting

    def _wait(self, awaited: list[tuple[ProposalRow, DraftSession]], deadline_s: float | None) -> bool:
        """Take in messages until every awaited row is answered or its time is over; returns whether that is nothing against the draft."""
        started = time.monotonic()
        while (connection := self._connection) is not None:
            open_rows = [
                (row, session)
                for row, session in awaited
                if session.wanted is not None and session.tree is None
            ]
            if not open_rows:
                break
            pong_s = connection.last_sign_s
            until = max(
                self._patience.until(row, session, started, deadline_s, pong_s) for row, session in open_rows
            )
            remaining = until - time.monotonic()
            if remaining <= 0:
                return self._missed(open_rows, deadline_s is None, pong_s)
            self._take_reply(connection, remaining)
        return True

    def _take_reply(self, connection: Connection, timeout_s: float) -> bool:
        """Take in one message, if one comes in time; False when the connection has ended."""
        reply = connection.receive(timeout_s)
        if reply is not None:
            self._handle(connection, reply)
        elif connection.ended.is_set() and connection is self._connection:
            self._go_over(None)
        return not connection.ended.is_set()

    def _missed(
        self, open_rows: list[tuple[ProposalRow, DraftSession]], patient: bool, pong_s: float
    ) -> bool:
        """Some rows got no answer in time: a fault if they could wait, else a miss, unless the draft is still opening them."""
        now = time.monotonic()
        for _row, session in open_rows:
            session.reason = "late" if session.warm else "warming"
            session.wanted = None
            session.in_vain = not session.warm
        if (
            patient
            or any(row.must_wait for row, _session in open_rows)
            or self._patience.is_over(now, pong_s)
        ):
            deadline_s = self._patience.fault_deadline_s
            _log.warning(
                "the draft owes an answer for more than %.1f s; decoding plainly until it shows life",
                deadline_s,
            )
            self._fault()
            return False
        late = any(session.warm for _row, session in open_rows)
        if late:
            self._breaker.miss(now)
        return not late

    def _fault(self) -> None:
        """Leave the draft alone for a while; after some faults in a row make a new connection."""
        self._breaker.trip(time.monotonic())
        self._patience.owed_s = None
        if self._breaker.faults % FAULTS_TO_RECONNECT == 0 and self._connection is not None:
            _log.warning("%d faults of the draft in a row; making a new connection", self._breaker.faults)
            self._connection.close()

    # ---- messages

    def _drain(self) -> None:
        connection = self._link.connection
        if connection is not None and connection.ended.is_set():
            connection = None
        if connection is not self._connection:
            self._go_over(connection)
        while connection is not None and (reply := connection.receive(0.0)) is not None:
            self._handle(connection, reply)

    def _handle(self, connection: Connection, reply: draft_pb2.SessionReply) -> None:
        self._patience.heard(time.monotonic())
        try:
            self._reply(reply)
        except ProtocolError as error:
            _log.warning("the draft broke the protocol: %s", error.message)
            connection.close()

    def _go_over(self, connection: Connection | None) -> None:
        """Use another connection from now on, or none: what the last one followed is lost."""
        self._connection = connection
        if connection is not None:
            assert connection.hello is not None
            self._hello = connection.hello
            self._spec = connection.spec
            self._bad_trees = 0
            self._gate.connected(connection)
            self._patience.owed_s = None
        for session in self._sessions.values():
            session.lose("draft_down" if connection is None else "resync")

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
                session.lose(reply.reject.reason or "rejected")
                session.rejected_until = time.monotonic() + (
                    reply.reject.retry_after_ms / 1e3 or REJECTED_FOR_S
                )
        elif kind in ("rounds_entered", "rounds_ended"):
            self._gate.hear(reply)
        elif kind == "hello":
            raise ProtocolError("a second Hello", field="hello")

    def _opened(self, ack: draft_pb2.OpenAck) -> None:
        session = self._sessions.get(ack.session_id)
        if (
            session is None
            or not session.live
            or session.acked
            or session.fence.epoch != ack.epoch
            or self._connection is None
        ):
            return
        session.opened(self._connection, self._identity.target_id, ack.have_len)

    def _take_tree(self, tree: draft_pb2.Tree) -> None:
        """Keep a tree if it answers what is asked now; anything late, twice or of another epoch is dropped."""
        session = self._sessions.get(tree.fence.session_id)
        if session is None or not session.live or session.fence.epoch != tree.fence.epoch:
            return
        session.answered()
        row = session.wanted
        if row is None or fence_from_proto(tree.fence) != row.fence:
            return
        try:
            session.tree = check_tree(tree, row.root_token, row.shape, self._identity.vocab_size)
            session.reason = "" if len(session.tree.tokens) > 1 else "empty_tree"
            self._bad_trees = 0
        except ProtocolError as error:
            session.wanted = None
            session.reason = "bad_tree"
            self._bad_trees += 1
            _log.warning("dropped a tree of the draft: %s", error.message)
            if self._bad_trees >= BAD_TREES_TO_TRIP:
                self._bad_trees = 0
                self._fault()

    # ---- helpers

    def _usable(self) -> Connection | None:
        """Return the connection if the draft may be talked to."""
        return None if self._breaker.refuses_all else self._connection

    def _obstacle(
        self, session: DraftSession, row: ProposalRow, connection: Connection | None, asked: int
    ) -> str:
        if connection is None:
            return DrafterState.DOWN.value
        if not session.live:
            return session.reason or "resync"
        if self._breaker.state is BreakerState.HALF_OPEN and asked:
            return "half_open"
        if self._breaker.state is BreakerState.OPEN and not row.must_wait:
            return "late"
        if not fits(row.shape, self._hello):
            return "shape_above_draft"
        if session.fence != row.fence:
            session.lose()
            return "resync"
        return ""
