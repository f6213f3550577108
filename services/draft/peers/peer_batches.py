"""Runs rounds on this device for a target in another process: admits, records, enqueues and ends them.

`PeerBatches` admits one batch of one target at a time, or reports why the batch cannot enter. `PeerBatch`
runs the rounds of an admitted batch. In each round, the draft receives a state (the chosen tokens and their
features) and returns trees. An `Exchange` transfers states and trees in stream order. `RoundState` is this
draft's copy of the state.

The target sends the tokens of a round after it has read them back. RoundsEnter has the pending tokens,
RoundsNext n + 1 or later those that round n chose, and RoundsLeave all but those of the last round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.kernels.round_trade import admit_counts, pack_trees
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.growth.slot_rounds import SessionGroup, SlotRounds
from outrider.services.draft.growth.tree_grower import max_round_rows
from outrider.services.draft.peers.exchange import Exchange
from outrider.services.draft.peers.round_buffers import RoundBuffers
from outrider.services.draft.peers.round_sizes import (
    kind_of,
    length_class_of,
    load_sampling,
    size_of,
    tell_pending,
)
from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import WARMING, PeerId, Session
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.fence import extend_prefix_hash
from outrider.shared.spec.resident import packed_bytes
from outrider.shared.spec.tree import DraftShape

MAX_STATE_BYTES = 16 * 1024 * 1024
"""Largest accepted `RoundState.packed`."""
MAX_SIZES = 64
"""Number of round sizes that are kept. Each size has its own memory and graphs."""
STATE_LIMIT_S = 2.0
"""Limit of the device's wait for a state. The target sends its state as soon as its pass is over."""


class PeerBatch:
    """The rounds of one batch and one tree shape, from RoundsEnter to RoundsLeave. Engine thread only.

    Args:
        batches: All batches, with the graphs that they share.
        message: The RoundsEnter message.
        sessions: The sessions of the message's rows, with the message's tokens already appended.
        slots: Prepares the rounds of these sessions.
        buffers: Buffers of this size.
        before: The sessions' prefix hashes before the message's tokens were appended.
    """

    def __init__(
        self,
        batches: PeerBatches,
        message: draft_pb2.RoundsEnter,
        sessions: Sequence[Session],
        slots: SlotRounds,
        buffers: RoundBuffers,
        before: Sequence[int],
    ) -> None:
        self.id = message.rounds
        self._batches = batches
        self._sessions: list[Session | None] = list(sessions)
        self._slots = slots
        self._buffers = buffers
        self._size = kind_of(message)
        self._shape = DraftShape(message.shape.depth, message.shape.topk, message.shape.max_nodes)
        self._group = self._seat([session.committed_len for session in sessions])
        self._untold = [
            (row.base_len, prefix_hash) for row, prefix_hash in zip(message.rows, before, strict=True)
        ]
        self._next: draft_pb2.RoundsNext | None = None
        self._num_run = 0
        self._num_told = 0

    def ready(self, message: draft_pb2.RoundsNext) -> bool:
        """Prepare the round that `message` announces; return False if there is no memory for the round."""
        self._tell(message.chosen)
        if len(message.committed_upper) != len(self._sessions):
            return False
        self._group = self._seat(message.committed_upper)
        if any(self._sessions[row] is not None for row in self._group.refused):
            return False
        self._group.stage()
        self.prepare()
        self._next = message
        return True

    def go(self, number: int, exchange: Exchange) -> bool:
        """Enqueue the prepared round; return False if `number` is not that round's number."""
        message, self._next = self._next, None
        if message is None or message.number != number:
            return False
        buffers = self._buffers
        exchange.take(message, buffers.blob, buffers.expected, STATE_LIMIT_S)
        # Write the pages after the wait. If target and draft share a GPU by time-slicing, a copy before the
        # wait would cost the target a time-slice.
        self._group.load()
        self._batches.graphs.run(self._key, self._round)
        exchange.give(message, buffers.trees.blob)
        self._batches.tried.add(self._key)
        self._num_run += 1
        return True

    def prepare(self) -> None:
        """Record the round unless its graph exists already."""
        if not self._batches.graphs.holds(self._key):
            self._buffers.expected.fill_(-1)  # idle rows: recording runs the round for real
            self._batches.graphs.capture(self._key, self._round)

    def drop_forgotten(self, followed: Callable[[Session], bool]) -> None:
        """Make the rows of sessions that have ended idle."""
        for row, session in enumerate(self._sessions):
            if session is not None and not followed(session):
                session.engaged = False
                self._sessions[row] = None

    def leave(self, chosen: Sequence[draft_pb2.RoundTokens]) -> list[Session]:
        """End the rounds as if every commit but the last had arrived; return the sessions that are lost."""
        self._tell(chosen)
        lost: list[Session] = []
        for row, session in enumerate(self._sessions):
            if session is None:
                continue
            session.last_state = None
            if self._num_run == 0:
                committed_len, session.prefix_hash = self._untold[row]
                del session.tokens[committed_len:]
            elif self._num_told != self._num_run - 1:
                lost.append(session)
            session.cached_rows = session.num_rows
            session.features = FeatureQueue(session.cached_rows)
        self._end()
        return lost

    def abandon(self) -> list[Session]:
        """End the rounds immediately; return their sessions, which lack rows from now on."""
        lost = [session for session in self._sessions if session is not None]
        self._end()
        return lost

    @property
    def tried(self) -> bool:
        """True if the next round has run before, as a graph if graphs are enabled."""
        return self._key in self._batches.tried and (
            self._batches.graphs.replays(self._key) or not self._batches.graphs.enabled
        )

    @property
    def _key(self) -> Hashable:
        return (*self._size, self._group.key)

    def _round(self) -> None:
        """Run one round. All its tensors stay at fixed addresses."""
        buffers = self._buffers
        # If the state did not arrive in time, the blob still contains an earlier round. The round then stores
        # and drafts nothing.
        admit_counts(buffers.number, buffers.expected, buffers.state.counts)
        trees, out = self._group.draft(buffers.rows), buffers.trees
        pack_trees(trees.num_nodes, trees.tokens, trees.parents, out.num_nodes, out.tokens, out.parents)

    def _tell(self, chosen: Sequence[draft_pb2.RoundTokens]) -> None:
        for outcome in chosen:
            tokens = iter(outcome.token_ids)
            per_row = [[next(tokens) for _ in range(count)] for count in outcome.counts]
            for session, chosen_tokens in zip(self._sessions, per_row, strict=True):
                if session is not None and chosen_tokens:
                    self._slots.committed(session, chosen_tokens, drafted=True)
            self._num_told += 1

    def _seat(self, committed_upper: Sequence[int]) -> SessionGroup:
        columns = max_round_rows(self._shape.bounded())
        batch_size = self._buffers.state.bs
        return self._slots.seat(self._sessions, committed_upper, self._shape, batch_size, columns)

    def _end(self) -> None:
        for session in self._sessions:
            if session is not None:
                session.engaged = False
        self._sessions = [None] * len(self._sessions)


class PeerBatches:
    """Admits and runs the rounds of remote targets: one batch of one target at a time. Engine thread only.

    While a CUDA stream waits for a target's state, nothing else runs on that stream. A second target
    therefore ends the rounds of the first, and both targets then run through the host.

    Args:
        engine: The sessions and the drafting strategy.
        device: Device of the rounds.
        now: Returns monotonic seconds.
    """

    def __init__(
        self, engine: DraftEngine, device: torch.device, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.graphs = engine.strategy.rounds.graphs.cache if engine.strategy.rounds else GraphCache(device)
        self.tried: set[Hashable] = set()
        self._engine = engine
        self._device = device
        self._now = now
        self._buffers: dict[tuple[int, int, int], RoundBuffers] = {}
        self._served: set[Hashable] = set()
        self._rounds: PeerBatch | None = None
        self._peer: PeerId | None = None

    @property
    def peer(self) -> PeerId | None:
        """The target whose rounds are on the device now, or None."""
        return self._peer

    def has_served(self, message: draft_pb2.RoundsEnter) -> bool:
        """True if rounds of this size and similar lengths have begun before, and thus begin without delay.

        Any thread may call this.
        """
        return (kind_of(message), length_class_of(message)) in self._served

    @torch.inference_mode()
    def enter(self, peer: PeerId, message: draft_pb2.RoundsEnter, exchange: Exchange) -> str:
        """Start rounds. Return an empty string, or the reason why they cannot start."""
        rounds = self._engine.strategy.rounds
        if rounds is None:
            return "no_rounds"
        if self._rounds is not None or any(session.peer != peer for session in self._engine.sessions):
            return "busy"
        shape = DraftShape(message.shape.depth, message.shape.topk, message.shape.max_nodes)
        if not self._serves(message, shape, rounds):
            return "size"
        buffers = self._buffers_for(message, rounds)
        if not exchange.mend() or not exchange.fits(buffers.blob, buffers.trees.blob):
            return "mailbox"
        found = [self._engine.sessions.get(peer, row.fence.session_id) for row in message.rows]
        sessions = [session for session in found if session is not None]
        rows = list(zip(sessions, message.rows, strict=False))
        if len(sessions) < len(found) or not all(
            self._continues(session, row, message.columns) for session, row in rows
        ):
            return "resync"
        if self.warming(peer, message):
            return WARMING
        if not all(self._make_room(session, row, shape, rounds) for session, row in rows):
            return "kv_full"
        while behind := [session for session in sessions if session.extendable_rows > 0]:
            self._engine.strategy.extend(behind, self._engine.strategy.info.extend_rows)
        before = [session.prefix_hash for session in sessions]
        for session, row in rows:
            tell_pending(session, row, self._now())
        load_sampling(buffers.state, sessions)
        slots = SlotRounds(rounds.memory, self._now)
        self._rounds = PeerBatch(self, message, sessions, slots, buffers, before)
        self._peer = peer
        self._rounds.prepare()
        self._served.add((kind_of(message), length_class_of(message)))
        return ""

    @torch.inference_mode()
    def record(self, message: draft_pb2.RoundsEnter) -> None:
        """Record rounds of a size in advance, unless they cannot run here or other rounds are running."""
        rounds = self._engine.strategy.rounds
        shape = DraftShape(message.shape.depth, message.shape.topk, message.shape.max_nodes)
        if (
            rounds is None
            or self._rounds is not None
            or self._engine.strategy.missing()
            or not self._serves(message, shape, rounds)
        ):
            return
        buffers = self._buffers_for(message, rounds)
        PeerBatch(self, message, (), SlotRounds(rounds.memory, self._now), buffers, ()).prepare()

    def warming(self, peer: PeerId, message: draft_pb2.RoundsEnter) -> bool:
        """True if rows of these sessions have not arrived yet. False if a session is unknown."""
        found = [self._engine.sessions.get(peer, row.fence.session_id) for row in message.rows]
        return None not in found and not all(
            self._engine.sessions.complete(session) for session in found if session is not None
        )

    @torch.inference_mode()
    def run(self, peer: PeerId, message: draft_pb2.RoundsNext, exchange: Exchange) -> bool:
        """Enqueue or prepare the next round. Return False if the target's rounds have already ended."""
        self._engine.touch(peer)
        rounds = self._current(peer, message.rounds)
        if rounds is None:
            return False
        rounds.drop_forgotten(self._followed)
        if (
            exchange.broken
            or not rounds.ready(message)
            or (exchange.goes_ahead(message, rounds.tried) and not rounds.go(message.number, exchange))
        ):
            self.abandon(peer)
            return False
        return True

    @torch.inference_mode()
    def go(self, peer: PeerId, message: draft_pb2.RoundState, exchange: Exchange) -> bool:
        """Enqueue the prepared round whose state has arrived; return False if another round is prepared."""
        rounds = self._current(peer, message.rounds)
        if rounds is None:
            return False
        if not rounds.go(message.number, exchange):
            self.abandon(peer)
            return False
        return True

    @torch.inference_mode()
    def leave(self, peer: PeerId, message: draft_pb2.RoundsLeave, exchange: Exchange) -> None:
        """End rounds at the target's request. Does nothing if they have ended already."""
        rounds = self._current(peer, message.rounds)
        if rounds is not None:
            rounds.drop_forgotten(self._followed)
            self._rounds = self._peer = None
            self._lose(rounds.abandon() if exchange.broken else rounds.leave(message.chosen))

    @torch.inference_mode()
    def abandon(self, peer: PeerId) -> None:
        """End a target's rounds immediately.

        The target's sessions then lack rows, so the draft forgets them and the target reopens them.
        """
        if self._rounds is not None and self._peer == peer:
            rounds, self._rounds, self._peer = self._rounds, None, None
            rounds.drop_forgotten(self._followed)
            self._lose(rounds.abandon())

    def _current(self, peer: PeerId, number: int) -> PeerBatch | None:
        return (
            self._rounds
            if self._rounds is not None and self._peer == peer and self._rounds.id == number
            else None
        )

    def _followed(self, session: Session) -> bool:
        return self._engine.sessions.get(session.peer, session.session_id) is session

    def _lose(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._engine.sessions.lose(session)

    def _continues(self, session: Session, row: draft_pb2.Commit, columns: int) -> bool:
        """True if a row continues its session exactly at the session's committed length."""
        fence, fresh = row.fence, row.token_ids
        limits = self._engine.sessions.limits
        return (
            fence.epoch == session.epoch
            and row.base_len == session.committed_len
            and 1 <= len(fresh) <= columns
            and fence.committed_len == row.base_len + len(fresh) <= limits.max_len
            and all(token < limits.vocab_size for token in fresh)
            and extend_prefix_hash(session.prefix_hash, fresh) == fence.prefix_hash
        )

    def _make_room(
        self, session: Session, row: draft_pb2.Commit, shape: DraftShape, rounds: DeviceGrowth
    ) -> bool:
        memory = rounds.memory
        needed = memory.tokens_needed(row.fence.committed_len, shape.bounded())
        if memory.tables.width_for(needed) is None or not self._engine.strategy.reserve(session):
            return False
        return session.lease is not None and memory.reserve(session.lease, needed)

    def _serves(self, message: draft_pb2.RoundsEnter, shape: DraftShape, rounds: DeviceGrowth) -> bool:
        """True if rounds of this size can run here at all."""
        engine = self._engine
        if not shape.drafts or not engine.sessions.allows(shape):
            return False
        if len(message.rows) > message.batch or max_round_rows(shape.bounded()) > message.columns:
            return False
        size, dtype = engine.strategy.info.feature_size, rounds.memory.pool.dtype
        if message.feature_size != size or (size and message.feature_dtype != wire_dtype(dtype)):
            return False
        known = rounds.graphs.admits(message.batch) and (
            len(self._buffers) < MAX_SIZES or size_of(message) in self._buffers
        )
        return known and packed_bytes(message.batch, message.columns, size, dtype) <= MAX_STATE_BYTES

    def _buffers_for(self, message: draft_pb2.RoundsEnter, rounds: DeviceGrowth) -> RoundBuffers:
        key = size_of(message)
        if key not in self._buffers:
            self._buffers[key] = RoundBuffers.make(message, rounds.memory.pool.dtype, self._device)
        return self._buffers[key]
