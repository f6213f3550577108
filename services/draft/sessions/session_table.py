"""The draft's session table: opens, commits, closes, evicts and expires sessions, without any model.

Every message carries a `Fence`: session, epoch, committed length, and hash of the committed tokens. Repeated
or late messages are dropped and counted. If a message does not fit its session, the draft forgets the session
and replies RESYNC. The target then opens the session again with a higher epoch.

Ledger of one session (which event ends each resource):

    resource                    created by      ended by
    Session in the table        `open`          `close`, `drop_peer`, `expire`, eviction by `open`, any RESYNC
    KV pages (session.lease)    the strategy    `release`, when the session ends

Invariant: ``0 <= cached_rows <= num_rows``. KV rows may be computed from features (`RowSource`). The row at
position t then needs the feature of t and the token at t + 1. In this case, ``cached_rows <=
features.contiguous`` and ``num_rows = committed_len - 1`` also hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.services.draft.sessions.feature_queue import EarlyRows, FeatureQueue
from outrider.services.draft.sessions.session import (
    ACCEPTED,
    Ask,
    Begin,
    MessageResult,
    MessageVerdict,
    PeerId,
    RefusalReason,
    RowSource,
    Session,
    common_rows,
    inherit,
)
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

REFUSED_RETRY_MS = 1000
NEVER_MS = 24 * 60 * 60 * 1000

USUAL_SHAPE = DraftShape(5, 4, 16)
"""Shape of the trees that a target requests by default."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the draft's session table.

    Attributes:
        max_sessions: Largest number of sessions, over all targets.
        max_len: Largest number of tokens of one session.
        vocab_size: Every token id must be smaller than this number.
        feature_size: Width of a feature row; 0 if the strategy needs no features.
        max_shape: Largest tree that can be requested.
        lease_s: A target that is silent for this many seconds loses its sessions.
        evict_idle_s: Idle time in seconds after which the least recently used session of a full table may be
            evicted.
        row_source: The input from which the strategy's KV rows are computed.
        rewind: Controls the rows that are computed again when a session is opened again. The session keeps
            the KV rows of the prefix that its old and new tokens share, except the last `rewind` + 1 rows.
        usual_shape: The shape of most trees, which the warm-up prepares.
    """

    max_sessions: int
    max_len: int
    vocab_size: int
    feature_size: int
    max_shape: DraftShape
    lease_s: float = 10.0
    evict_idle_s: float = 1.0
    row_source: RowSource = RowSource.FEATURES
    rewind: int = 0
    usual_shape: DraftShape = USUAL_SHAPE


class SessionTable:
    """All sessions of all targets. Engine thread only. The argument `now` of methods is in monotonic seconds.

    Args:
        limits: Limits of the table.
        release: Called once for every session that ends, to free the strategy's resources for that session.
        begin: Finds the cached KV rows with which a session begins (`DraftStrategy.begin`). By default, a
            session begins with the rows of the session that it replaces.
    """

    def __init__(
        self, limits: SessionLimits, release: Callable[[Session], None], begin: Begin | None = None
    ) -> None:
        self.limits = limits
        self._release = release
        self._begin = begin or inherit
        self._sessions: dict[tuple[PeerId, int], Session] = {}
        self._last_heard_s: dict[PeerId, float] = {}
        self._early = EarlyRows()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, peer: PeerId, session_id: int) -> Session | None:
        """Return a session, or None."""
        return self._sessions.get((peer, session_id))

    def touch(self, peer: PeerId, now: float) -> None:
        """Record that a peer is alive."""
        self._last_heard_s[peer] = now

    def open(self, peer: PeerId, opening: SequenceOpen, now: float) -> MessageResult:
        """Start following a sequence of a target, or restart it at a higher epoch.

        A restarted sequence keeps the cached KV rows of the prefix that its old and new tokens share. A new
        sequence begins with stored KV rows of earlier sequences if the strategy has any.
        """
        # 1. Check the opening itself, then compare it with the session that it would replace.
        fence, tokens = opening.fence, opening.token_ids
        known = self.get(peer, fence.session_id)
        if known is not None and fence.epoch < known.epoch:
            return MessageResult(MessageVerdict.DROPPED, RefusalReason.STALE_EPOCH)
        if len(tokens) > self.limits.max_len:
            return self._reject(known, RefusalReason.TOO_LONG)
        if not self._valid(tokens) or len(tokens) != fence.committed_len or not tokens:
            return self._reject(known, RefusalReason.MALFORMED)
        if extend_prefix_hash(FNV_OFFSET, tokens) != fence.prefix_hash:
            return self._reject(known, RefusalReason.PREFIX_MISMATCH)
        if known is not None and fence.epoch == known.epoch:
            same = known.tokens[: len(tokens)] == list(tokens)
            return (
                MessageResult(MessageVerdict.DROPPED, RefusalReason.DUPLICATE)
                if same
                else self._resync(known, RefusalReason.PREFIX_MISMATCH)
            )
        if known is None and not self._make_room(now):
            return MessageResult(
                MessageVerdict.REJECTED,
                RefusalReason.FULL,
                retry_after_ms=max(1, int(self.limits.evict_idle_s * 1000)),
            )
        # 2. Register the session.
        session = Session(
            peer,
            fence.session_id,
            fence.epoch,
            list(tokens),
            fence.prefix_hash,
            opening.seed,
            opening.temperature,
            opening.choice_index,
            FeatureQueue(),
            now,
            row_source=self.limits.row_source,
            cache_salt=opening.cache_salt,
        )
        kept = 0 if known is None else common_rows(session, known, self.limits.rewind)
        session.cached_rows = self._begin(session, known, kept, opening.stored_len)
        session.inherited_rows = session.cached_rows
        if session.row_source is RowSource.FEATURES:
            session.features = FeatureQueue(session.cached_rows)
        self._sessions[peer, fence.session_id] = session
        # 3. Add the features that arrived before the opening.
        for base, rows in self._early.take(peer, fence.session_id, fence.epoch):
            answer = self.add_features(peer, fence.session_id, fence.epoch, base, rows, now)
            if answer.verdict is not MessageVerdict.ACCEPTED:
                return answer
        return MessageResult(MessageVerdict.ACCEPTED, have_len=session.features.contiguous)

    def add_features(
        self, peer: PeerId, session_id: int, epoch: int, base: int, rows: torch.Tensor, now: float
    ) -> MessageResult:
        """Add feature rows of positions ``[base, base + n)`` from the target's bulk stream.

        The bulk stream is ordered for each session. Its rows may arrive before the message that opens the
        session, because that message travels on another stream. Such early rows are kept for a limited time.
        """
        session = self.get(peer, session_id)
        if session is None or epoch > session.epoch:
            self._early.keep(peer, session_id, epoch, base, rows, now)
            return MessageResult(MessageVerdict.DROPPED, RefusalReason.EARLY)
        if epoch < session.epoch:
            return MessageResult(MessageVerdict.DROPPED, RefusalReason.STALE_EPOCH)
        session.last_used_s = now
        if (
            rows.dim() != 2
            or rows.shape[1] != self.limits.feature_size
            or base + rows.shape[0] > self.limits.max_len
        ):
            return self._resync(session, RefusalReason.MALFORMED)
        if base > session.features.contiguous or not session.features.add(base, rows):
            return self._resync(session, RefusalReason.FEATURE_GAP)
        return MessageResult(MessageVerdict.ACCEPTED, have_len=session.features.contiguous)

    def commit(self, peer: PeerId, commit: Commit, ask: Ask | None, now: float) -> MessageResult:
        """Append the tokens that a round chose, and store the request for the next tree.

        With `ask` None, no request is stored. A commit that repeats the session's current state only renews
        the request. A commit that belongs to an earlier state is dropped.
        """
        fence = commit.fence
        session = self.get(peer, fence.session_id)
        if session is None:
            return MessageResult(MessageVerdict.RESYNC, RefusalReason.UNKNOWN_SESSION)
        if fence.epoch < session.epoch:
            return MessageResult(MessageVerdict.DROPPED, RefusalReason.STALE_EPOCH)
        if fence.epoch > session.epoch:
            return self._resync(session, RefusalReason.UNKNOWN_EPOCH)
        if fence.committed_len < session.committed_len:
            return MessageResult(MessageVerdict.DROPPED, RefusalReason.LATE)
        problem = self._problem(session, commit)
        if problem is not RefusalReason.NONE:
            return self._resync(session, problem)
        session.last_used_s = now
        fresh = commit.token_ids[session.committed_len - commit.base_len :]
        prefix_hash = extend_prefix_hash(session.prefix_hash, fresh)
        if prefix_hash != fence.prefix_hash:
            return self._resync(session, RefusalReason.PREFIX_MISMATCH)
        session.tokens.extend(fresh)
        session.prefix_hash = prefix_hash
        if (
            commit.features is not None
            and commit.features.shape[0]
            and not session.features.add(commit.base_len - 1, commit.features)
        ):
            return self._resync(session, RefusalReason.FEATURE_GAP)
        if ask is not None and not self.allows(ask.shape):
            session.ask = None
            return MessageResult(MessageVerdict.REJECTED, RefusalReason.SHAPE)
        session.ask = ask
        return ACCEPTED

    def cancel(self, peer: PeerId, round_number: int) -> int:
        """Drop the requests of a round and return their number."""
        cancelled = [
            session
            for session in self
            if session.peer == peer and session.ask and session.ask.round == round_number
        ]
        for session in cancelled:
            session.ask = None
        return len(cancelled)

    def close(self, peer: PeerId, session_id: int) -> MessageResult:
        """Stop following a sequence and free its resources."""
        session = self.get(peer, session_id)
        if session is None:
            return MessageResult(MessageVerdict.DROPPED, RefusalReason.UNKNOWN_SESSION)
        self._forget(session)
        return ACCEPTED

    def drop_peer(self, peer: PeerId) -> int:
        """Forget every session of a peer and return their number."""
        self._last_heard_s.pop(peer, None)
        self._early.drop_peer(peer)
        mine = [session for session in self if session.peer == peer]
        for session in mine:
            self._forget(session)
        return len(mine)

    def expire(self, now: float) -> list[Session]:
        """Forget the sessions of peers that were silent for `lease_s`, and return these sessions."""
        self._early.expire(now)
        silent = {
            peer for peer, heard_s in self._last_heard_s.items() if now - heard_s >= self.limits.lease_s
        }
        expired = [session for session in self if session.peer in silent]
        for session in expired:
            self._forget(session)
        return expired

    def ready(self) -> list[Session]:
        """Return the sessions with a requested tree and complete features, longest waiting first."""
        waiting = [session for session in self if session.ask is not None and self.complete(session)]
        return sorted(waiting, key=lambda session: session.ask.asked_s if session.ask else 0.0)

    def extendable(self) -> list[Session]:
        """Return the sessions that have rows to add, except those whose rounds stay on the device."""
        return [session for session in self if session.extendable_rows > 0 and not session.engaged]

    def lose(self, session: Session) -> None:
        """Forget a session that the draft can no longer follow. Its next commit is answered with RESYNC."""
        session.spoiled = True
        self._forget(session)

    def evict_idle(self, now: float, keep: Collection[int] = ()) -> bool:
        """Forget the least recently used session that was idle for at least `evict_idle_s` seconds.

        Three kinds of sessions are never evicted:

        - sessions with a request for a tree
        - sessions whose rounds stay on the device
        - sessions in `keep` (ids of `Session` objects)

        Returns:
            True if a session was evicted.
        """
        candidates = [s for s in self if id(s) not in keep and s.ask is None and not s.engaged]
        idle = [s for s in candidates if now - s.last_used_s >= self.limits.evict_idle_s]
        if not idle:
            return False
        self._forget(min(idle, key=lambda session: session.last_used_s))
        return True

    def check(self) -> None:
        """Assert the invariants of every session."""
        assert len(self._sessions) <= self.limits.max_sessions
        for (peer, session_id), session in self._sessions.items():
            assert (peer, session_id) == (session.peer, session.session_id)
            assert 0 <= session.cached_rows <= session.num_rows
            if session.row_source is RowSource.FEATURES:
                assert session.cached_rows == session.features.consumed <= session.features.contiguous
            assert extend_prefix_hash(FNV_OFFSET, session.tokens) == session.prefix_hash

    def complete(self, session: Session) -> bool:
        """Return whether all inputs of a tree have arrived."""
        if session.row_source is not RowSource.FEATURES:
            return True
        # A tree grows from the row before the root, so a session needs more than one committed token.
        return session.num_rows > 0 and session.features.contiguous >= session.num_rows

    def allows(self, shape: DraftShape) -> bool:
        """Return whether trees of this shape may be requested."""
        most = self.limits.max_shape
        return (
            1 <= shape.max_nodes <= most.max_nodes
            and 0 <= shape.depth <= most.depth
            and 1 <= shape.topk <= most.topk
        )

    def _valid(self, tokens: Sequence[int]) -> bool:
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.limits.vocab_size)

    def _problem(self, session: Session, commit: Commit) -> RefusalReason:
        """Return the reason to reject a commit that is not older than the session's state.

        The result is `RefusalReason.NONE` if there is no such reason. This check does not compare the hash
        of the tokens.
        """
        fence = commit.fence
        if commit.base_len > session.committed_len:
            return RefusalReason.GAP
        if (
            commit.base_len < 1
            or len(commit.token_ids) != fence.committed_len - commit.base_len
            or not self._valid(commit.token_ids)
        ):
            return RefusalReason.MALFORMED
        if fence.committed_len > self.limits.max_len:
            return RefusalReason.TOO_LONG
        rows = commit.features
        if rows is None or not rows.shape[0]:
            return RefusalReason.NONE
        fits = (
            rows.dim() == 2
            and rows.shape[1] == self.limits.feature_size
            and rows.shape[0] == len(commit.token_ids)
        )
        return RefusalReason.NONE if fits else RefusalReason.MALFORMED

    def _make_room(self, now: float) -> bool:
        return len(self) < self.limits.max_sessions or self.evict_idle(now)

    def _reject(self, known: Session | None, reason: RefusalReason) -> MessageResult:
        """Refuse an opening, and forget the session that the opening would replace.

        The target no longer uses the session that is forgotten.
        """
        if known is not None:
            self._forget(known)
        return MessageResult(
            MessageVerdict.REJECTED,
            reason,
            retry_after_ms=NEVER_MS if reason is RefusalReason.TOO_LONG else REFUSED_RETRY_MS,
        )

    def _resync(self, session: Session, reason: RefusalReason) -> MessageResult:
        session.spoiled = True
        self._forget(session)
        return MessageResult(MessageVerdict.RESYNC, reason)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.peer, session.session_id]
        self._release(session)
