"""The draft engine: batches requests for trees, reserves KV memory, and extends sessions while idle.

The engine combines the session table with one drafting strategy. The draft service's loop or the in-process
drafter calls it on one thread. If KV memory is short, the engine evicts idle sessions. It also drops requests
whose deadline has passed.

For a target in the same process, `seat` prepares the sessions that draft in the next round. Drafting and
verification then alternate on the GPU. The host reads the results one round late (see `growth.slot_groups`).

    messages       → sessions   Drop stale messages, which their fences identify. Resync on a contradiction.
    ready sessions → extend     Compute K/V from the target's features of committed tokens.
                   → propose    Grow trees, one batch per (depth, topk).
    idle           → extend     Compute K/V of prompt rows while the target is still prefilling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.services.draft.growth.draft_graph import pending_rows
from outrider.services.draft.growth.slot_groups import SessionGroup, SlotGroups
from outrider.services.draft.metrics import DraftMetrics
from outrider.services.draft.sessions.session import (
    Ask,
    MessageResult,
    MessageVerdict,
    PeerId,
    RefusalReason,
    Session,
)
from outrider.services.draft.sessions.session_spans import SessionSpans
from outrider.services.draft.sessions.session_table import SessionLimits, SessionTable
from outrider.services.draft.strategies.base import DraftStrategy
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftBatch, DraftShape

OUT_OF_PAGES_RETRY_MS = 1000
"""Delay before a target may reopen a session that was refused because pages or borrowed tensors were
missing."""


@dataclass(frozen=True, slots=True)
class TreeOrigin:
    """The session state from which a tree was grown: peer, fence and the target's round."""

    peer: PeerId
    fence: Fence
    round: int


@dataclass(frozen=True, slots=True)
class ProposedTrees:
    """Trees of one batch; row b is the tree of ``origins[b]``."""

    origins: tuple[TreeOrigin, ...]
    trees: DraftBatch


@dataclass(frozen=True, slots=True)
class Refusal:
    """A session that was dropped because KV memory ran out; the target may retry after a delay."""

    peer: PeerId
    session_id: int
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of one `DraftEngine.step`."""

    proposals: tuple[ProposedTrees, ...]
    refusals: tuple[Refusal, ...]


class DraftEngine:
    """The draft engine: follows the target's sequences as sessions, and grows draft trees for them.

    Args:
        strategy: The drafting strategy.
        limits: Limits on sessions, lengths and tree shapes.
        metrics: Counters and histograms that the engine updates.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        strategy: DraftStrategy,
        limits: SessionLimits,
        metrics: DraftMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.strategy = strategy
        self.metrics = metrics
        self.spans = SessionSpans()
        self.sessions = SessionTable(limits, strategy.release, strategy.begin)
        self._clock = clock
        self._slot_groups = None if strategy.growth is None else SlotGroups(strategy.growth.memory, clock)

    def open(self, peer: PeerId, opening: SequenceOpen) -> MessageResult:
        """Start following a sequence of the target, or restart it at a higher epoch.

        The verdict is REJECTED with the reason NOT_READY while the draft lacks tensors that it borrows from
        the target.
        """
        self.sessions.touch(peer, self._clock())
        if self.strategy.missing():
            return self._counted(
                "open",
                MessageResult(
                    MessageVerdict.REJECTED, RefusalReason.NOT_READY, retry_after_ms=OUT_OF_PAGES_RETRY_MS
                ),
            )
        answer = self._counted("open", self.sessions.open(peer, opening, self._clock()))
        if answer.verdict is MessageVerdict.ACCEPTED:
            self.spans.opened(peer, opening.fence.session_id, opening.traceparent)
        return answer

    def add_features(
        self, peer: PeerId, session_id: int, epoch: int, base: int, rows: torch.Tensor
    ) -> MessageResult:
        """Store feature rows of a prompt or a resync, for positions ``[base, base + rows)``."""
        now = self._clock()
        self.sessions.touch(peer, now)
        return self._counted("features", self.sessions.add_features(peer, session_id, epoch, base, rows, now))

    def commit(self, peer: PeerId, commit: Commit, ask: Ask | None) -> MessageResult:
        """Append the tokens that a round chose. Store the request for the next tree, unless it is None."""
        now = self._clock()
        self.sessions.touch(peer, now)
        return self._counted("commit", self.sessions.commit(peer, commit, ask, now))

    def cancel(self, peer: PeerId, round_number: int) -> None:
        """Cancel the trees that a peer requested in one round."""
        self.sessions.touch(peer, self._clock())
        self.metrics.dropped.labels(message="ask", reason="cancelled").inc(
            self.sessions.cancel(peer, round_number)
        )

    def close(self, peer: PeerId, session_id: int) -> MessageResult:
        """Stop following a sequence and free its memory."""
        self.sessions.touch(peer, self._clock())
        self.spans.closing(peer, session_id, self.sessions.get(peer, session_id))
        return self._counted("close", self.sessions.close(peer, session_id))

    def touch(self, peer: PeerId) -> None:
        """Renew a peer's lease."""
        self.sessions.touch(peer, self._clock())

    def drop_peer(self, peer: PeerId) -> int:
        """Forget every session of a peer that has left, and return the number of these sessions."""
        self.spans.left(peer)
        return self.sessions.drop_peer(peer)

    def expire(self) -> int:
        """Forget the sessions of peers that have been silent for too long; return the number of sessions."""
        expired = len(self.sessions.expire(self._clock()))
        self.metrics.expired.inc(expired)
        return expired

    def has_work(self) -> bool:
        """True if `step` has anything to do."""
        return bool(self.sessions.ready() or self.sessions.extendable())

    def step(self) -> Drafted:
        """Grow the requested trees. If there are none, feed one chunk of waiting rows to the strategy."""
        ready = self.sessions.ready()
        if ready:
            return self._draft(ready)
        return Drafted((), self._warm())

    def give_up(self) -> int:
        """Forget every session that a failed step may have corrupted; return the number of sessions.

        The targets open the forgotten sessions again.
        """
        # Sessions that the failed step was working on.
        tainted = {id(session): session for session in (*self.sessions.ready(), *self.sessions.extendable())}
        # Sessions that have rows in the KV but no state of their last row. The failed step may have extended
        # these sessions only in part.
        tainted |= {
            id(session): session
            for session in self.sessions
            if session.cached_rows and session.last_state is None
        }
        for session in tainted.values():
            self.sessions.lose(session)
        return len(tainted)

    def check(self) -> None:
        """Assert that the lengths of all sessions and the page counts are consistent."""
        self.sessions.check()
        pages = self.strategy.pages()
        assert pages.free + pages.held == pages.total, f"{pages.free} + {pages.held} pages of {pages.total}"
        assert len(self.sessions) or not pages.held, f"{pages.held} pages held without a session"

    def _draft(self, ready: Sequence[Session]) -> Drafted:
        started = self._clock()
        kept, refusals = self._reserve(ready)
        groups = list(self._groups(kept, started))
        # For each session whose group drafts in one launch: how many of its last rows that launch may add.
        left = {
            id(session): pending_rows(session.ask.shape) if self._goes_on(session) else 1
            for group in groups
            if self._in_one_go(group)
            for session in group
            if session.ask
        }
        self._extend([session for session in kept if id(session) not in left])
        self._extend([session for session in kept if id(session) in left], left)
        extended = self._clock()
        proposals = tuple(self._propose(group, in_one_go=id(group[0]) in left) for group in groups)
        self.metrics.extend_seconds.observe(extended - started)
        if proposals:
            self.metrics.propose_seconds.observe(self._clock() - extended)
        return Drafted(proposals, refusals)

    def _in_one_go(self, group: Sequence[Session]) -> bool:
        """True if one launch extends these sessions by their last rows and grows their trees."""
        growth = self.strategy.growth
        if growth is None or growth.host is None:
            return False
        return all(
            session.ask is not None and session.ask.shape.drafts and session.extendable_rows > 0
            for session in group
        )

    def _goes_on(self, session: Session) -> bool:
        """True if one launch may add any number of rows to a session.

        If False, other passes must first add all rows but the last one. These passes compute the states with
        which the later layers of the model continue (see `StrategyInfo.rewind`).
        """
        fresh = session.cached_rows - session.inherited_rows
        return not session.inherited_rows or fresh >= self.strategy.info.rewind

    def _extend(self, sessions: Sequence[Session], left: Mapping[int, int] | None = None) -> None:
        """Extend sessions by their waiting rows.

        Args:
            sessions: Sessions with reserved memory.
            left: Maps the id of a `Session` object to the largest number of its rows to leave for the launch
                that grows its tree. At least one row is left. With None, each session is extended by all of
                its rows.
        """
        while behind := [
            session for session in sessions if session.extendable_rows > (left[id(session)] if left else 0)
        ]:
            self.strategy.extend(behind, self.strategy.info.extend_rows, keep=1 if left else 0)

    def _propose(self, group: Sequence[Session], in_one_go: bool) -> ProposedTrees:
        origins = tuple(
            TreeOrigin(session.peer, session.fence, session.ask.round)
            for session in group
            if session.ask is not None
        )
        growth = self.strategy.growth
        trees = (
            growth.host.draft(group) if in_one_go and growth and growth.host else self.strategy.propose(group)
        )
        for session in group:
            session.ask = None
        self.metrics.trees.inc(len(group))
        return ProposedTrees(origins, trees)

    def absorb(self, peer: PeerId, session_ids: Sequence[int]) -> None:
        """Compute the K/V of the received feature rows of prompts that the target is still prefilling.

        The last received row of each session is left for later. A session for which no memory is free is
        skipped. This method evicts no idle sessions to free memory.
        """
        found = [self.sessions.get(peer, session_id) for session_id in session_ids]
        behind = [one for one in found if one is not None and one.extendable_rows > 1 and not one.engaged]
        kept = [session for session in behind if self.strategy.reserve(session)]
        self._extend(kept, {id(session): 1 for session in kept})

    def lacking(self, peer: PeerId, session_id: int) -> range | None:
        """Return the positions of the feature rows that a session needs; see `DeviceDrafter.lacking`."""
        session, groups = self.sessions.get(peer, session_id), self._slot_groups
        return None if session is None or groups is None else groups.lacking(session)

    def catch_up(self, peer: PeerId, session_ids: Sequence[int]) -> None:
        """Extend sessions by all rows received so far. Sessions without memory are skipped."""
        found = [self.sessions.get(peer, session_id) for session_id in session_ids]
        behind = [session for session in found if session is not None and session.extendable_rows > 0]
        self._extend([session for session in behind if self.strategy.reserve(session)])

    def seat(
        self,
        peer: PeerId,
        session_ids: Sequence[int],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
    ) -> SessionGroup:
        """Prepare sessions for one round on the device; see `DeviceDrafter.seat`."""
        groups = self._slot_groups
        assert groups is not None, "the strategy cannot draft on the device"
        sessions = [self.sessions.get(peer, session_id) for session_id in session_ids]
        for session in sessions:
            # A session may have no lease yet. After a prompt of one token, for example, all of its rows are
            # in its slot.
            if session is not None and session.lease is None:
                self.strategy.reserve(session)
        return groups.seat(sessions, committed_upper, shape, batch_size, columns)

    def committed(self, peer: PeerId, session_id: int, tokens: Sequence[int], *, drafted: bool) -> None:
        """Receive the tokens of a pass on the device; see `DeviceDrafter.committed`."""
        session, groups = self.sessions.get(peer, session_id), self._slot_groups
        if session is not None and groups is not None:
            groups.committed(session, tokens, drafted=drafted)

    def _warm(self) -> tuple[Refusal, ...]:
        kept, refusals = self._reserve(self.sessions.extendable())
        if kept:
            self.strategy.extend(kept, self.strategy.info.extend_rows)
        return refusals

    def _reserve(self, sessions: Sequence[Session]) -> tuple[list[Session], tuple[Refusal, ...]]:
        """Reserve memory for each session, evicting idle sessions if necessary.

        Returns:
            The sessions that have memory, and a `Refusal` for each session without memory. Refused sessions
            are forgotten.
        """
        kept: list[Session] = []
        refusals: list[Refusal] = []
        in_use = {id(session) for session in sessions}
        for session in sessions:
            while not (reserved := self.strategy.reserve(session)) and self.sessions.evict_idle(
                self._clock(), keep=in_use
            ):
                self.metrics.evicted.inc()
            if reserved:
                kept.append(session)
                continue
            self.sessions.lose(session)
            self.metrics.dropped.labels(message="session", reason="kv_full").inc()
            refusals.append(Refusal(session.peer, session.session_id, OUT_OF_PAGES_RETRY_MS))
        return kept, tuple(refusals)

    def _groups(self, sessions: Sequence[Session], now: float) -> Iterator[list[Session]]:
        """Yield batches of requests with equal depth and topk. Drop requests whose deadline has passed."""
        groups: dict[tuple[int, int], list[Session]] = {}
        for session in sessions:
            ask = session.ask
            assert ask is not None, "only ready sessions are grouped"
            if ask.deadline_s is not None and now > ask.deadline_s:
                session.ask = None
                self.metrics.dropped.labels(message="ask", reason="late").inc()
                continue
            shape = ask.shape.bounded()
            groups.setdefault((shape.depth, shape.topk), []).append(session)
        yield from groups.values()

    def _counted(self, message: str, answer: MessageResult) -> MessageResult:
        """Return the answer, after counting it in the metrics if its verdict is not ACCEPTED."""
        if answer.verdict is MessageVerdict.ACCEPTED:
            return answer
        if answer.verdict is MessageVerdict.RESYNC:
            self.metrics.resyncs.labels(reason=answer.reason.value).inc()
        else:
            self.metrics.dropped.labels(message=message, reason=answer.reason.value).inc()
        return answer
