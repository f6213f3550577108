"""One followed sequence, what may be asked for it, and what becomes of a message about it."""

from __future__ import annotations

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
    """What the strategy computes the rows of its KV from, and so how many rows a complete session has."""

    FEATURES = "features"
    """The row at position t pairs the feature of t with token t + 1; the last row is the one before the root."""
    TOKENS = "tokens"
    """The row at position t is token t; the last row is the root's."""
    NONE = "none"
    """There are no rows."""


class Verdict(Enum):
    """What became of a message."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"
    RESYNC = "resync"
    REJECTED = "rejected"


class Reason(Enum):
    """Why a message was not accepted."""

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
class Answer:
    """The verdict on one message. `have_len` = feature rows held (accepted open or features); `retry_after_ms` for REJECTED."""

    verdict: Verdict
    reason: Reason = Reason.NONE
    have_len: int = 0
    retry_after_ms: int = 0


ACCEPTED = Answer(Verdict.ACCEPTED)


@dataclass(frozen=True, slots=True)
class Ask:
    """The tree that the target wants for a session's present state.

    Attributes:
        round: The target's round, echoed in the answer.
        shape: How large a tree.
        asked_s: When it was asked, monotonic.
        deadline_s: From when on nobody waits for it, monotonic; None = unknown.
    """

    round: int
    shape: DraftShape
    asked_s: float
    deadline_s: float | None = None


@dataclass(slots=True)
class Session:
    """One sequence. `features` is what arrived and is not in the strategy's KV yet; `cached_rows` is what is."""

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
    ask: Ask | None = None
    lease: PageLease | None = None
    last_state: torch.Tensor | None = None
    """What the strategy computed for the last cached row; levels grow from it."""
    row_source: RowSource = RowSource.FEATURES
    engaged: bool = False
    """Its rounds stay on the device: nobody may take its memory, and only those rounds know all of its tokens."""

    @property
    def committed_len(self) -> int:
        """Chosen tokens, the root included."""
        return len(self.tokens)

    @property
    def fence(self) -> Fence:
        """The fence of the present state."""
        return Fence(self.session_id, self.epoch, self.committed_len, self.prefix_hash)

    @property
    def num_rows(self) -> int:
        """Rows that the strategy's KV holds once everything committed is in it."""
        if self.row_source is RowSource.FEATURES:
            return self.committed_len - 1
        return self.committed_len if self.row_source is RowSource.TOKENS else 0

    @property
    def extendable_rows(self) -> int:
        """Rows whose inputs are all here and that are not in the strategy's KV yet."""
        known = (
            min(self.features.contiguous, self.num_rows)
            if self.row_source is RowSource.FEATURES
            else self.num_rows
        )
        return known - self.cached_rows
