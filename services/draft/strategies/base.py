"""Defines `DraftStrategy`, the interface between the draft engine and the different ways of drafting.

A strategy may be a recurrent head (EAGLE), layers of the target's checkpoint (MTP), a standalone model, or
n-grams. Every strategy processes the new tokens of sessions, and returns trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.sessions.session import RowSource, Session
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftBatch

EXTEND_ROWS = 512
"""Largest number of rows per pass over prompts. The limit bounds memory and the wait of other sessions."""


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """Description of a drafting strategy, for the handshake with the target and for the logs.

    Attributes:
        algorithm: Name of the algorithm, for example ``EAGLE3``.
        model_id: Name of the draft's checkpoint folder.
        fingerprint: Fingerprint of the draft's weights.
        vocab_size: Size of the target vocabulary that the strategy was made for.
        feature_size: Width of the feature rows that the strategy reads; 0 if it reads no features.
        max_len: Largest number of tokens of a session.
        row_source: The input from which the strategy's KV rows are computed.
        hidden_size: Hidden size of the strategy's model; 0 if the strategy has no model.
        rewind: Controls the rows that are computed again when a session is opened again. The session keeps
            the KV rows of the prefix that its old and new tokens share, except the last `rewind` + 1 rows.
        extend_rows: Largest number of rows in one pass over prompts.
    """

    algorithm: str
    model_id: str
    fingerprint: str
    vocab_size: int
    feature_size: int
    max_len: int
    row_source: RowSource = RowSource.FEATURES
    hidden_size: int = 0
    rewind: int = 0
    extend_rows: int = EXTEND_ROWS


@dataclass(frozen=True, slots=True)
class Pages:
    """Page counts of a drafting strategy's own KV pool; all zero without a pool.

    Stored pages of ended sessions count as free, because they are evicted when pages are needed.
    """

    total: int
    free: int
    held: int


class DraftStrategy(Protocol):
    """One way of drafting: processes the new tokens of sessions, and returns trees.

    Only the engine thread may use a strategy. The exceptions are `info` and `feature_spec`: these never
    change, so any thread may use them.

    Attributes:
        info: Description of the strategy.
        growth: The strategy's work that runs in a single launch, for example in a CUDA graph. None if the
            strategy has no such work.
    """

    info: StrategyInfo
    growth: DeviceGrowth | None

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """Return the hidden states of the target that the strategy reads as features.

        If `target` is None, the result contains only the properties that do not depend on a target.

        Raises:
            CheckpointError: The strategy does not fit the target. The message names the key and the fix.
        """
        ...

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the target's tensors that the target must still lend.

        Drafting can start only when no tensor is missing.
        """
        ...

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Store one of the missing tensors.

        Raises:
            CheckpointError: The tensor is not missing, or its shape is wrong.
        """
        ...

    def begin(self, session: Session, known: Session | None, kept: int, stored_len: int) -> int:
        """Find the KV rows of a new session that need not be computed.

        Args:
            session: The new session, without memory.
            known: The session that the new session replaces. The memory of `known` passes to the new session
                or is freed. None for a sequence that the draft does not follow yet.
            kept: Number of KV rows of `known` that are valid for the new session.
            stored_len: Number of leading rows that the session may share with earlier sessions.

        Returns:
            The number of leading rows that the strategy's KV contains, at most ``session.num_rows - 1``. 0 if
            there are none.
        """
        ...

    def reserve(self, session: Session) -> bool:
        """Reserve the memory to extend the session and to grow the requested tree.

        Returns:
            False if too little memory is free now.
        """
        ...

    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        """Compute new KV rows of sessions with reserved memory, except the last `keep` rows of each session.

        One call adds at most `max_rows` rows over all sessions, so a long prompt needs several calls.
        """
        ...

    def propose(self, sessions: Sequence[Session]) -> DraftBatch:
        """Grow one tree per session.

        The sessions must be extended and reserved, and all requested trees must have the same depth and topk.
        """
        ...

    def release(self, session: Session) -> None:
        """Free all resources of a session."""
        ...

    def pages(self) -> Pages:
        """Return the page counts of the KV pool."""
        ...
