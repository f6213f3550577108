"""The state of one followed sequence (`Session`), requests for trees (`Ask`), and verdicts on messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import torch

from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.shared.kv.pages import PageLease
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftShape

PeerId = NewType("PeerId", int)
"""One session stream of one target; never reused within a process."""


class RowSource(Enum):
    """The input from which a strategy computes its KV rows.

    The input determines which rows a complete session has.
    """

    FEATURES = "features"
    """The row at position t pairs the feature of t with token t + 1. The last row is just before the root."""
    TOKENS = "tokens"
    """The row at position t is token t. The last row is the root's row."""
    NONE = "none"
    """There are no rows."""


class MessageVerdict(Enum):
    """The outcome of a message."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"
    RESYNC = "resync"
    REJECTED = "rejected"


class RefusalReason(Enum):
    """The reason why a message was not accepted."""

    NONE = ""
    DUPLICATE = "duplicate"
    LATE = "late"
    EARLY = "early"
    STALE_EPOCH = "stale_epoch"
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_EPOCH = "unknown_epoch"
    GAP = "gap"
    PREFIX_MISMATCH = "prefix_mismatch"
    MALFORMED = "malformed"
    FEATURE_GAP = "feature_gap"
    FULL = "max_sessions"
    NOT_READY = "missing_tensors"
    SHAPE = "shape_above_limits"
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class MessageResult:
    """The draft's verdict on one message of a target.

    Attributes:
        verdict: The outcome of the message.
        reason: The reason why the message was not accepted.
        have_len: Number of feature rows that the draft has stored. Set only after an accepted message that
            opens the session or adds features.
        retry_after_ms: Time to wait before the next attempt, in milliseconds. Only for the verdict REJECTED.
    """

    verdict: MessageVerdict
    reason: RefusalReason = RefusalReason.NONE
    have_len: int = 0
    retry_after_ms: int = 0


ACCEPTED = MessageResult(MessageVerdict.ACCEPTED)


@dataclass(frozen=True, slots=True)
class Ask:
    """A target's request for a tree that continues a session's current tokens.

    Attributes:
        round: The number of the target's round. The reply contains the same number.
        shape: Requested shape of the tree.
        asked_s: Time of the request, monotonic seconds.
        deadline_s: Time after which the target ignores the tree, monotonic seconds. None if the time is
            unknown.
    """

    round: int
    shape: DraftShape
    asked_s: float
    deadline_s: float | None = None


@dataclass(slots=True)
class Session:
    """The draft's record of one sequence of a target.

    `features` contains the feature rows that have arrived but are not in the strategy's KV yet. `cached_rows`
    is the number of rows in that KV.
    """

    peer: PeerId
    session_id: int
    epoch: int
    tokens: list[int]
    prefix_hash: int
    seed: int
    temperature: float
    choice_index: int
    features: FeatureQueue
    last_used_s: float
    cached_rows: int = 0
    inherited_rows: int = 0
    """Number of cached rows that were computed before the session was opened again."""
    ask: Ask | None = None
    lease: PageLease | None = None
    last_state: torch.Tensor | None = None
    """The strategy's state for the last cached row. Trees grow from this state."""
    row_source: RowSource = RowSource.FEATURES
    engaged: bool = False
    """True while the session's rounds stay on the device. No other code may then free the session's memory,
    and the host does not have the session's newest tokens yet."""
    cache_salt: str | None = None
    """The session shares stored rows only with sessions of the same salt. With None, it shares none."""
    spoiled: bool = False
    """True if the rows in the KV may be wrong. They must not be stored for other sessions."""
    ready: bool = False
    """True once the target knows that all rows of the opening have arrived."""

    @property
    def committed_len(self) -> int:
        """Number of committed tokens, including the root (the last token, from which trees grow)."""
        return len(self.tokens)

    @property
    def fence(self) -> Fence:
        """The fence of the current state."""
        return Fence(self.session_id, self.epoch, self.committed_len, self.prefix_hash)

    @property
    def num_rows(self) -> int:
        """Number of rows in the strategy's KV once all committed tokens are processed."""
        if self.row_source is RowSource.FEATURES:
            return self.committed_len - 1
        return self.committed_len if self.row_source is RowSource.TOKENS else 0

    @property
    def extendable_rows(self) -> int:
        """Number of rows that can be computed now and are not in the strategy's KV yet."""
        known = (
            min(self.features.contiguous, self.num_rows)
            if self.row_source is RowSource.FEATURES
            else self.num_rows
        )
        return known - self.cached_rows


Begin = Callable[[Session, Session | None, int, int], int]
"""`DraftStrategy.begin`."""


def inherit(session: Session, known: Session | None, kept: int, stored_len: int) -> int:
    """Let a session begin with the rows of the session that it replaces; see `DraftStrategy.begin`."""
    if known is not None:
        session.lease, known.lease = known.lease, None
    return kept


def common_rows(session: Session, known: Session, rewind: int) -> int:
    """Return the number of cached KV rows that a session can keep from the session that it replaces.

    These are the rows of the prefix that both sessions share, except the last `rewind` + 1 rows. The excepted
    rows are computed again, because growing a tree needs their states.
    """
    shared = 0
    for mine, theirs in zip(session.tokens, known.tokens, strict=False):
        if mine != theirs:
            break
        shared += 1
    # The row at position t also depends on token t + 1.
    valid = shared - 1 if session.row_source is RowSource.FEATURES else shared
    return max(0, min(known.cached_rows, valid, session.num_rows - 1) - rewind)
