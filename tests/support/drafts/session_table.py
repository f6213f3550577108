"""A session table with a clock of its own, and the messages of a made-up target, for tests of sessions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.services.draft.sessions.session import (
    Ask,
    MessageResult,
    MessageVerdict,
    PeerId,
    RefusalReason,
    Session,
)
from outrider.services.draft.sessions.session_table import SessionLimits, SessionTable
from outrider.shared.kv.pages import PageAllocator
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

WIDTH, VOCAB = 2, 50
PEER, OTHER = PeerId(1), PeerId(2)
SHAPE = DraftShape(3, 2, 5)
LIMITS = SessionLimits(
    max_sessions=3,
    max_len=60,
    vocab_size=VOCAB,
    feature_size=WIDTH,
    max_shape=DraftShape(8, 8, 64),
    lease_s=10.0,
    evict_idle_s=1.0,
)


def feature_of(tokens: Sequence[int], position: int) -> list[float]:
    """Return a feature row that identifies the prefix it was computed from."""
    digest = extend_prefix_hash(FNV_OFFSET, tokens[: position + 1])
    return [float(position), float(digest % 100003)]


def rows_of(tokens: Sequence[int], start: int, stop: int) -> torch.Tensor:
    return torch.tensor([feature_of(tokens, position) for position in range(start, stop)]).view(-1, WIDTH)


def fence_of(tokens: Sequence[int], session_id: int = 1, epoch: int = 1) -> Fence:
    return Fence(session_id, epoch, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))


def opening(tokens: Sequence[int], session_id: int = 1, epoch: int = 1) -> SequenceOpen:
    return SequenceOpen(fence_of(tokens, session_id, epoch), tokens, seed=0, temperature=0.0)


def commit_of(
    tokens: Sequence[int], base_len: int, session_id: int = 1, epoch: int = 1, features: bool = True
) -> Commit:
    rows = rows_of(tokens, base_len - 1, len(tokens) - 1) if features else None
    return Commit(fence_of(tokens, session_id, epoch), base_len, tokens[base_len:], rows)


class Table(SessionTable):
    """A table whose sessions hold pages, as a strategy would reserve them."""

    def __init__(self, limits: SessionLimits = LIMITS) -> None:
        self.pages = PageAllocator(64)
        super().__init__(limits, self._free)

    @staticmethod
    def _free(session: Session) -> None:
        if session.lease is not None:
            session.lease.release()

    def extend_all(self) -> None:
        """Consume every available row and check that it matches the session's tokens."""
        for session in list(self):
            count = session.extendable_rows
            if count > 0:
                session.lease = session.lease or self.pages.allocate(1)
                rows = session.features.take(count)
                stop = session.cached_rows + count
                assert torch.equal(rows, rows_of(session.tokens, session.cached_rows, stop))
                session.cached_rows = stop

    def check(self) -> None:
        super().check()
        self.pages.check()
        assert self.pages.held_pages == sum(
            len(session.lease.pages) for session in self if session.lease is not None
        )


def ask(round_number: int = 1, shape: DraftShape = SHAPE) -> Ask:
    return Ask(round_number, shape, asked_s=0.0)


def expect(
    answer: MessageResult, verdict: MessageVerdict, reason: RefusalReason = RefusalReason.NONE
) -> None:
    assert (answer.verdict, answer.reason) == (verdict, reason)


def started(table: Table, tokens: Sequence[int], session_id: int = 1) -> Session:
    expect(table.open(PEER, opening(tokens, session_id), 0.0), MessageVerdict.ACCEPTED)
    expect(
        table.add_features(PEER, session_id, 1, 0, rows_of(tokens, 0, len(tokens)), 0.0),
        MessageVerdict.ACCEPTED,
    )
    session = table.get(PEER, session_id)
    assert session is not None
    return session
