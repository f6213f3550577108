"""Rounds on the device with a remote draft: assigns slots at the draft to sessions, and announces each round.

The draft receives these messages, in order, on one stream:

- SlotsOpen, when a connection begins.
- RoundsNext, once per round, as soon as the target has enqueued the round. It lists the sessions that join a
  slot, the slots that draft, the tokens that are new since the last message, and the newly free slots.
- SlotsUpdate, if no round follows soon. It lists only the new tokens and the newly free slots.

A *series* of rounds lasts until a round fails. All sessions in slots are then opened again, because the draft
may lack some of their feature rows. Most feature rows need not be sent again, because the draft keeps those
of all reported tokens.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.breaker import Breaker, BreakerState
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.deadlines import AnswerDeadlines
from outrider.services.target.draft_client.exchange_blobs import ExchangeBlobs
from outrider.services.target.draft_client.round_waits import RoundWaits
from outrider.services.target.draft_client.session import DraftSession
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.services.target.draft_client.trees import draft_can_grow
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.drafter import AWAITED, BACKING_OFF, WARMING, DrafterState
from outrider.shared.spec.exchanged_slots import ExchangedGroup, ExchangedSlots, TreeExchange
from outrider.shared.spec.resident import GroupSize
from outrider.shared.spec.tree import DraftShape

SLOTS = 1024
"""Number of slots at the draft. A target has at most 256 slots of its own."""
FIRST_LIMIT_S = 0.2
"""Shortest limit, in seconds, of the wait for trees in the first round with a combination of group sizes. The
draft may be slow in such a round."""
MAX_ROUND_NUMBER = 1 << 30
"""Largest round number, reached after months of rounds.

This is half the range of int32, because a mailbox uses larger numbers to mark its end.
"""
RESYNC = "resync"

_log = logging.getLogger("outrider.target.draft")


@dataclass(frozen=True, slots=True)
class _Seat:
    slot: int
    session: DraftSession


class RemoteSlots(ExchangedSlots):
    """The slots at one draft service, for rounds that stay on the devices. Engine thread only.

    Args:
        device: The target's device.
        vocab_size: The target's vocabulary size.
        dtype: Data type of the feature rows.
        sessions: The drafter's sessions.
        deadlines: Limits the waits for trees, based on measured times. Receives the times of rounds.
        breaker: Circuit breaker that stops rounds while the draft is faulty or slow. Receives late rounds.
        take_reply: Function that waits for a message of the draft and processes it. Its argument is the
            longest wait in seconds.
        on_fault: Called when sequences without a deadline (mode `on`) have waited in vain for trees in which
            no other sequence was waiting. Its argument is the wait in seconds.
    """

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        dtype: torch.dtype,
        sessions: Mapping[int, DraftSession],
        deadlines: AnswerDeadlines,
        breaker: Breaker,
        take_reply: Callable[[Connection, float], bool],
        on_fault: Callable[[float], None],
    ) -> None:
        self._blobs = ExchangeBlobs(device, vocab_size)
        self._dtype = dtype
        self._sessions = sessions
        self._deadlines = deadlines
        self._breaker = breaker
        self._take_reply = take_reply
        self._on_fault = on_fault
        self._waits = RoundWaits(deadlines.times, breaker, on_fault)
        self._connection: Connection | None = None
        self._accepted = False
        self._sizes: list[draft_pb2.RoundsEnter] = []
        # The current series; 0 if there is none. Series and rounds take their numbers from one counter.
        self._series = 0
        self._last_number = 0
        self._seats: dict[int, _Seat] = {}
        self._free: list[int] = []
        self._told: list[draft_pb2.SlotTokens] = []
        self._left: list[int] = []
        # Combinations of sizes that this connection has carried.
        self._known: set[tuple[GroupSize, ...]] = set()

    # ---- the connection

    def connected(self, connection: Connection) -> None:
        """Open the slots at a new draft, and announce the sizes of rounds that this target has recorded."""
        self._drop_series()
        self._connection, self._accepted = connection, False
        self._known.clear()
        if self._channel is None or connection.spec is None:
            return
        opening = draft_pb2.SlotsOpen(
            slots=SLOTS,
            feature_size=connection.spec.feature_size,
            feature_dtype=wire_dtype(self._dtype),
        )
        connection.send(draft_pb2.SessionRequest(slots_open=opening))
        for size in self._sizes:
            connection.send(draft_pb2.SessionRequest(rounds_prepare=size))

    def lost(self) -> None:
        """Forget the connection, which has ended."""
        self._drop_series()
        self._connection, self._accepted = None, False

    def hear(self, reply: draft_pb2.SessionReply) -> None:
        """Process a message about slots."""
        kind = reply.WhichOneof("message")
        if kind == "slots_opened":
            self._accepted = reply.slots_opened.accepted
            if not self._accepted:
                _log.info("all rounds run through the host: %s", reply.slots_opened.reason)
        elif kind == "slot_ready":
            ready = reply.slot_ready
            session = self._sessions.get(ready.session_id)
            if session is not None and session.live and session.fence.epoch == ready.epoch:
                session.ready = True
        elif kind == "rounds_ended" and reply.rounds_ended.rounds == self._series and self._series:
            self._waits.pause(reply.rounds_ended.reason, time.monotonic())
            self._end_series()

    def are_open(self) -> bool:
        connection, channel = self._connection, self._channel
        if connection is None or channel is None or not self._accepted:
            return False
        if self._breaker.state is not BreakerState.CLOSED or connection.ended.is_set():
            return False
        now = time.monotonic()
        if self._series and channel.broken:
            self._waits.late(None, 0.0, now)
            self._end_series()
        if self._last_number >= MAX_ROUND_NUMBER:
            self._restart_numbers(connection)
            return False
        return self._waits.allow(now)

    # ---- the sessions

    def obstacle(self, session_id: int, shape: DraftShape, *, must_wait: bool) -> str:
        session, connection = self._sessions.get(session_id), self._connection
        if session is None:
            return "not_followed"
        if connection is None:
            return DrafterState.DOWN.value
        if self._breaker.refuses_all:
            return BACKING_OFF
        if not session.live:
            return session.reason or RESYNC
        if connection.hello is not None and not draft_can_grow(shape, connection.hello):
            return "shape_above_draft"
        if session.ready:
            session.joining = False
            return ""
        if not must_wait:
            return WARMING
        now = time.monotonic()
        if not session.joining:
            session.joining, session.asked_s = True, now
        if now < self._deadlines.row_until(session, connection.last_sign_s):
            return AWAITED
        session.joining = False
        self._on_fault(now - session.asked_s)
        return WARMING

    def chosen(self, session_id: int, number: int, base_len: int, tokens: Sequence[int]) -> None:
        seat = self._seat_of(session_id)
        if seat is not None:
            self._told.append(
                draft_pb2.SlotTokens(slot=seat.slot, number=number, base_len=base_len, token_ids=tokens)
            )

    def left(self, session_ids: Iterable[int]) -> None:
        for session_id in session_ids:
            seat = self._seats.pop(session_id, None)
            if seat is not None:
                self._left.append(seat.slot)
                heapq.heappush(self._free, seat.slot)

    def flush(self) -> None:
        if self._connection is not None and self._series and (self._told or self._left):
            self._connection.send(draft_pb2.SessionRequest(slots_update=self._take_update()))

    # ---- the rounds

    @property
    def others_s(self) -> float:
        return self._deadlines.times.exchange_s

    def fits(self, sizes: Sequence[GroupSize]) -> bool:
        channel = self._channel
        if channel is None or self._connection is None or self._connection.spec is None:
            return False
        feature_size = self._connection.spec.feature_size
        if not channel.fits(*self._blobs.views(sizes, feature_size, self._dtype)):
            return False
        return bool(self._series) or channel.mend()

    def begin(self, groups: Sequence[ExchangedGroup]) -> TreeExchange | None:
        # 1. Send the pending commits of joining sessions, after the unsent tokens and free slots.
        connection = self._connection
        if connection is None or self._channel is None or connection.spec is None:
            return None
        wanted = [session_id for group in groups for session_id in group.session_ids]
        present = {session_id for session_id in wanted if self._may_draft(session_id)}
        joining = [
            session_id for session_id in wanted if session_id in present and not self._seat_of(session_id)
        ]
        if not present or len(joining) > len(self._free) + SLOTS * (not self._series):
            return None
        waiting = [self._sessions[one] for one in joining if self._sessions[one].token_ids]
        if waiting:
            self.flush()
        for session in waiting:
            session.send_unasked(connection, 0)
        # 2. Give slots to the joining sessions.
        if not self._series:
            self._series = self._take_number()
            self._free = list(range(SLOTS))
        message = draft_pb2.RoundsNext(rounds=self._series, number=self._take_number())
        message.update.CopyFrom(self._take_update())
        for session_id in joining:
            session = self._sessions[session_id]
            seat = self._seats[session_id] = _Seat(heapq.heappop(self._free), session)
            message.joins.add(slot=seat.slot, session_id=session_id, epoch=session.fence.epoch)
        # 3. List the slots that draft.
        for group in groups:
            shape = group.shape
            rows = [
                (self._seats[session_id].slot, upper)
                for session_id, upper in zip(group.session_ids, group.committed_upper, strict=True)
                if session_id in present
            ]
            message.groups.add(
                shape=draft_pb2.Shape(depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes),
                batch=group.batch_size,
                columns=group.columns,
                slots=[slot for slot, _ in rows],
                committed_upper=[upper for _, upper in rows],
            )
        sizes = tuple(group.size for group in groups)
        started = self._blobs.round(
            message,
            sizes,
            self._channel,
            feature_size=connection.spec.feature_size,
            dtype=self._dtype,
            longest_s=self._deadlines.times.limit_s,
            least_s=0.0 if sizes in self._known else FIRST_LIMIT_S,
            refused=[session_id for session_id in wanted if session_id not in present],
        )
        self._known.add(sizes)
        self._waits.begun(started)
        return started

    def await_reply(self, seconds: float) -> None:
        if self._connection is not None:
            self._take_reply(self._connection, seconds)

    def measure(self, number: int, waited_s: float) -> None:
        started, connection, channel = self._waits.read(number), self._connection, self._channel
        if started is None or connection is None or channel is None or connection.ended.is_set():
            return
        if channel.broken:
            self._waits.late(started, waited_s, time.monotonic())
            self._end_series()
        else:
            self._waits.in_time(started, waited_s, time.monotonic())

    def send_state(self) -> None:
        if self._channel is not None:
            self._channel.send_state()

    def receive_trees(self, wanted: bool) -> None:
        if self._channel is not None:
            self._channel.receive_trees(wanted)

    def record(self, size: GroupSize, shape: DraftShape) -> None:
        message = draft_pb2.RoundsEnter(
            shape=draft_pb2.Shape(depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes),
            batch=size.batch_size,
            columns=size.columns,
        )
        if message not in self._sizes:
            self._sizes.append(message)
            if self._connection is not None and self._channel is not None:
                self._connection.send(draft_pb2.SessionRequest(rounds_prepare=message))

    # ---- helpers

    @property
    def _channel(self) -> Exchange | None:
        return None if self._connection is None else self._connection.carrier.exchange

    def _seat_of(self, session_id: int) -> _Seat | None:
        """Return the session's seat. Return None if the session was lost or reopened since it joined."""
        seat = self._seats.get(session_id)
        if seat is None:
            return None
        if seat.session is self._sessions.get(session_id) and seat.session.live:
            return seat
        self.left([session_id])
        return None

    def _may_draft(self, session_id: int) -> bool:
        session = self._sessions.get(session_id)
        return session is not None and session.live and session.ready

    def _take_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _take_update(self) -> draft_pb2.SlotsUpdate:
        update = draft_pb2.SlotsUpdate(rounds=self._series, told=self._told, left=self._left)
        self._told, self._left = [], []
        return update

    def _end_series(self) -> None:
        """End the series. The sessions in slots are lost, because the draft may lack some of their rows."""
        sessions = [seat.session for seat in self._seats.values() if seat.session.live]
        self._drop_series()
        for session in sessions:
            session.lose(RESYNC)

    def _drop_series(self) -> None:
        self._series = 0
        self._waits.end_series()
        self._seats.clear()
        self._told, self._left = [], []

    def _restart_numbers(self, connection: Connection) -> None:
        """Close the connection, so that the link opens a new one and round numbers can restart.

        The streams and slots of the old connection contain greater numbers. Trees that have arrived are
        discarded.
        """
        _log.info("round numbers restart over a new connection")
        connection.close()
        self._drop_series()
        self._last_number = 0
        self._blobs.forget()
