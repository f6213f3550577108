"""Runs the rounds of remote targets on the draft's device: assigns slots, records and enqueues rounds.

A target opens slots once, with the message SlotsOpen. The message RoundsNext announces a round. It lists the
sessions that join slots, and the slots that draft, in one group per tree shape. The round's state (the last
chosen tokens and their features) arrives on the device through an `Exchange`. The trees leave the same way.
After the target's host has read the tokens, the target sends them again for the draft's host.

    RoundsNext n+1     | update, joins · extend by rows of commits · reserve pages · enqueue the round
    state n+1 arrives  |                      group 1: extend, grow │ group 2: extend, grow │ trees n+1
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.engine import OUT_OF_PAGES_RETRY_MS, DraftEngine
from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.growth.slot_groups import SlotGroups
from outrider.services.draft.peers.exchange import Exchange
from outrider.services.draft.peers.group_buffers import GroupBuffers, JointBuffers
from outrider.services.draft.peers.group_draft import GroupDraft
from outrider.services.draft.peers.peer import Peer
from outrider.services.draft.peers.replies import ExchangeEnded, NeedResync, Rejected, SlotReady
from outrider.services.draft.peers.slot_seats import SlotSeats
from outrider.services.draft.sessions.session import RowSource, Session
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.resident import GroupSize, state_starts, trees_starts
from outrider.shared.spec.tree import DraftShape

MAX_STATE_BYTES = 16 * 1024 * 1024
"""Largest accepted state of a round."""
MAX_TREES_BYTES = 4 * 1024 * 1024
"""Largest trees of a round."""
MAX_SLOTS = 4096
"""Largest number of slots of a target."""
MAX_GROUPS = 64
"""Largest number of groups of a round."""
MAX_COLUMNS = 64
"""Largest number of columns of a state."""
MAX_SIZES = 64
"""Number of group sizes whose memory is kept. The number is limited because clients choose the sizes. A round
of any other size uses memory of its own and is not recorded."""
STATE_LIMIT_S = 2.0
"""Limit of the device's wait for a state. The target sends its state as soon as its pass is over."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A round that is announced, and waits to be enqueued."""

    message: draft_pb2.RoundsNext
    groups: Sequence[GroupDraft]
    joint: JointBuffers
    sessions: dict[int, Session]


class PeerSlots:
    """The slots and device rounds of all targets in other processes. Engine thread only, except for `peer`.

    A CUDA stream that waits for one target's state blocks the rounds of all other targets. If several targets
    have sessions, their rounds therefore run through the host.

    Args:
        engine: The draft engine, which has the sessions and the drafting strategy.
        device: Device of the rounds.
        now: Returns monotonic seconds.
    """

    def __init__(
        self, engine: DraftEngine, device: torch.device, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.graphs = engine.strategy.growth.graphs.cache if engine.strategy.growth else GraphCache(device)
        self._engine = engine
        self._device = device
        self._now = now
        self._slots: dict[Peer, SlotSeats] = {}
        self._buffers: dict[Hashable, GroupBuffers] = {}
        self._joint = JointBuffers(device)
        self._tried: set[Hashable] = set()
        self._prepared: tuple[Peer, _Prepared] | None = None
        self._holder: Peer | None = None

    @property
    def peer(self) -> Peer | None:
        """The target whose rounds are on the device now, or None. Any thread may read this."""
        return self._holder

    def open(self, peer: Peer, message: draft_pb2.SlotsOpen) -> str:
        """Open a target's slots. Return an empty string, or the reason why rounds run through the host."""
        growth = self._engine.strategy.growth
        if growth is None:
            return "no_rounds"
        size, dtype = self._engine.strategy.info.feature_size, growth.memory.pool.dtype
        if message.feature_size != size or (size and message.feature_dtype != wire_dtype(dtype)):
            return "features"
        if not 1 <= message.slots <= MAX_SLOTS:
            return "slots"
        self._slots[peer] = SlotSeats(message.slots, SlotGroups(growth.memory, self._now), self._followed)
        for session in self._engine.sessions:
            if session.peer == peer.id:
                self.report_ready(peer, session.session_id)
        return ""

    def report_ready(self, peer: Peer, session_id: int) -> None:
        """Tell the target that a session may join a slot, once all rows of its opening have arrived."""
        session = self._engine.sessions.get(peer.id, session_id)
        if session is None or session.ready or peer not in self._slots:
            return
        if self._has_rows(session):
            session.ready = True
            peer.send(SlotReady(session.session_id, session.epoch))

    @torch.inference_mode()
    def record(self, message: draft_pb2.RoundsEnter) -> None:
        """Record groups of a size in advance, unless they cannot run here or other rounds are running."""
        growth = self._engine.strategy.growth
        shape = DraftShape(message.shape.depth, message.shape.topk, message.shape.max_nodes)
        if growth is None or self._holder is not None or self._engine.strategy.missing():
            return
        if self._fits(message.batch, message.columns, shape) and message.batch <= growth.graphs.max_bs:
            group = SlotGroups(growth.memory, self._now).seat((), (), shape, message.batch, message.columns)
            buffers = self._buffers_for(message.batch, message.columns, shape, growth)
            GroupDraft(group, buffers, shape, ()).record(self.graphs)

    @torch.inference_mode()
    def update(self, peer: Peer, message: draft_pb2.SlotsUpdate) -> None:
        """Receive the tokens of passes, and empty slots."""
        seats = self._slots.get(peer)
        if seats is not None and seats.series == message.rounds and not seats.ended:
            self._update(peer, seats, message)
            self._holder = peer if seats.live else None

    @torch.inference_mode()
    def run(self, peer: Peer, message: draft_pb2.RoundsNext, exchange: Exchange) -> str:
        """Enqueue or prepare the next round. Return an empty string, or the reason why it cannot run."""
        self._engine.touch(peer.id)
        seats, growth = self._slots.get(peer), self._engine.strategy.growth
        if seats is None or growth is None:
            return "closed"
        if any(session.peer != peer.id for session in self._engine.sessions):
            return self._refuse(peer, message, "busy")
        if seats.series != message.rounds:
            seats.begin(message.rounds)
            if not exchange.mend():
                return self._refuse(peer, message, "mailbox")
        elif seats.ended or exchange.broken:
            return self._refuse(peer, message, "late")
        # 1. Follow the sessions.
        self._update(peer, seats, message.update)
        for join in message.joins:
            self._join(peer, seats, join)
        # 2. Prepare the groups.
        if not self._fits_together(message, seats, exchange):
            return self._refuse(peer, message, "size")
        prepared = self._prepare(peer, seats, message, growth)
        self._prepared = peer, prepared
        self._holder = peer
        # 3. Enqueue the round now if the device may wait for the state.
        keys = tuple(group.key for group in prepared.groups)
        tried = keys in self._tried and all(group.replays(self.graphs) for group in prepared.groups)
        if exchange.goes_ahead(message, tried) and not self._enqueue(peer, message.number, exchange):
            return self._refuse(peer, message, "late")
        return ""

    @torch.inference_mode()
    def go(self, peer: Peer, message: draft_pb2.RoundState, exchange: Exchange) -> str:
        """Enqueue the prepared round whose state has arrived; see `run`."""
        return "" if self._enqueue(peer, message.number, exchange) else "late"

    def abandon(self, peer: Peer) -> None:
        """End a target's rounds. Its sessions keep the rows that the target has reported."""
        seats = self._slots.get(peer)
        if seats is not None:
            seats.end()
        if self._prepared is not None and self._prepared[0] is peer:
            self._prepared = None
        if self._holder is peer:
            self._holder = None

    def leave(self, peer: Peer) -> None:
        """Forget a target."""
        self.abandon(peer)
        self._slots.pop(peer, None)

    def make_way(self, peer: Peer) -> None:
        """End the rounds of another target, because they block all other drafting."""
        other = self._holder
        if other is not None and other is not peer:
            series = self._slots[other].series
            self.abandon(other)
            other.send(ExchangeEnded(series, "busy"))

    def _refuse(self, peer: Peer, message: draft_pb2.RoundsNext, reason: str) -> str:
        seats = self._slots[peer]
        self.abandon(peer)
        seats.series = message.rounds
        return reason

    def _update(self, peer: Peer, seats: SlotSeats, message: draft_pb2.SlotsUpdate) -> None:
        limits = self._engine.sessions.limits
        for session in seats.add_tokens(message.told, max_len=limits.max_len, vocab_size=limits.vocab_size):
            self._lose(peer, session)
        seats.leave(message.left)

    def _join(self, peer: Peer, seats: SlotSeats, join: draft_pb2.SlotJoin) -> None:
        session = self._engine.sessions.get(peer.id, join.session_id)
        if session is None or session.epoch != join.epoch or join.slot >= seats.num_slots:
            peer.send(NeedResync(join.session_id, join.epoch, "unknown_session"))
        elif not self._has_rows(session):
            self._lose(peer, session)
        else:
            session.ask = None
            seats.join(join.slot, session)

    def _prepare(
        self, peer: Peer, seats: SlotSeats, message: draft_pb2.RoundsNext, growth: DeviceGrowth
    ) -> _Prepared:
        slots = SlotGroups(growth.memory, self._now)
        groups: list[GroupDraft] = []
        ran: dict[int, Session] = {}
        places: Counter[int] = Counter()
        for group in message.groups:
            shape = _shape_of(group)
            sessions = [seats.session(slot) for slot in group.slots]
            present = [session for session in sessions if session is not None]
            self._engine.catch_up(peer.id, [session.session_id for session in present])
            for session in present:
                if session.lease is None:
                    self._engine.strategy.reserve(session)
            place = places[group.batch]
            places[group.batch] += 1
            seated = slots.seat(sessions, group.committed_upper, shape, group.batch, group.columns, place)
            for row in seated.refused:
                refused = sessions[row]
                if refused is not None:
                    self._engine.sessions.lose(refused)
                    peer.send(Rejected(refused.session_id, "kv_full", OUT_OF_PAGES_RETRY_MS))
                    sessions[row] = None
            ran |= {
                slot: session
                for slot, session in zip(group.slots, sessions, strict=True)
                if session is not None
            }
            buffers = self._buffers_for(group.batch, group.columns, shape, growth)
            made = GroupDraft(seated, buffers, shape, sessions)
            if (
                buffers.kept
                and group.batch <= growth.graphs.max_bs
                and self.graphs.due(made.key, counted_as=made.key)
            ):
                made.record(self.graphs)
            made.stage()
            groups.append(made)
        return _Prepared(message, groups, self._joint, ran)

    def _enqueue(self, peer: Peer, number: int, exchange: Exchange) -> bool:
        """Enqueue the prepared round; return False if `number` is not that round's number."""
        found, self._prepared = self._prepared, None
        if found is None or found[0] is not peer or found[1].message.number != number:
            return False
        prepared = found[1]
        parts = prepared.joint.parts([group.buffers for group in prepared.groups])
        exchange.receive_state(prepared.message, parts.state, parts.expected, STATE_LIMIT_S)
        parts.spread()
        for group in prepared.groups:
            # Write the pages after the wait. If target and draft share a GPU by time-slicing, a copy before
            # the wait would cost the target a time-slice.
            group.load()
            group.run(self.graphs)
        parts.collect()
        exchange.send_trees(prepared.message, parts.trees)
        self._tried.add(tuple(group.key for group in prepared.groups))
        self._slots[peer].ran(number, prepared.sessions)
        return True

    def _has_rows(self, session: Session) -> bool:
        return session.row_source is not RowSource.FEATURES or session.features.contiguous >= session.num_rows

    def _lose(self, peer: Peer, session: Session) -> None:
        self._engine.sessions.lose(session)
        peer.send(NeedResync(session.session_id, session.epoch, "rounds"))

    def _followed(self, session: Session) -> bool:
        return self._engine.sessions.get(session.peer, session.session_id) is session

    def _fits_together(self, message: draft_pb2.RoundsNext, seats: SlotSeats, exchange: Exchange) -> bool:
        """True if the groups of a round can run here."""
        growth = self._engine.strategy.growth
        if growth is None or not 1 <= len(message.groups) <= MAX_GROUPS:
            return False
        slots = [slot for group in message.groups for slot in group.slots]
        if len(slots) != len(set(slots)) or any(slot >= seats.num_slots for slot in slots):
            return False
        for group in message.groups:
            if not len(group.slots) == len(group.committed_upper) <= group.batch <= seats.num_slots:
                return False
            if not self._fits(group.batch, group.columns, _shape_of(group)):
                return False
        sizes = [GroupSize(group.batch, group.columns, group.shape.max_nodes) for group in message.groups]
        states = state_starts(sizes, self._engine.strategy.info.feature_size, growth.memory.pool.dtype)
        trees = trees_starts(sizes)
        if states[-1] > MAX_STATE_BYTES or trees[-1] > MAX_TREES_BYTES:
            return False
        self._joint.reserve(states[-1], trees[-1])
        return exchange.fits(self._joint.states[: states[-1]], self._joint.trees[: trees[-1]])

    def _fits(self, batch: int, columns: int, shape: DraftShape) -> bool:
        """True if groups of this size can run here at all."""
        return (
            shape.drafts
            and self._engine.sessions.allows(shape)
            and 1 <= batch <= MAX_SLOTS
            and shape.bounded().columns <= columns <= MAX_COLUMNS
        )

    def _buffers_for(self, batch: int, columns: int, shape: DraftShape, growth: DeviceGrowth) -> GroupBuffers:
        key = (batch, columns, shape)
        if key in self._buffers:
            return self._buffers[key]
        size = GroupSize(batch, columns, shape.max_nodes)
        width, dtype = self._engine.strategy.info.feature_size, growth.memory.pool.dtype
        kept = len(self._buffers) < MAX_SIZES
        made = GroupBuffers.make(size, width, dtype, self._device, kept=kept)
        if kept:
            self._buffers[key] = made
        return made


def _shape_of(group: draft_pb2.SlotGroup) -> DraftShape:
    return DraftShape(group.shape.depth, group.shape.topk, group.shape.max_nodes)
