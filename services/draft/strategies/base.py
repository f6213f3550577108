"""Defines `DraftStrategy`, the interface between the draft engine and the ways of drafting.

A strategy may be a recurrent head (EAGLE), layers of the target's checkpoint (MTP), a standalone model, a
table of n-grams, or a block drafter. Every strategy extends sessions by their new rows and returns trees. The
engine relies on nothing else.
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
    """Description of a strategy, for the handshake and the logs.

    Attributes:
        algorithm: Name of the algorithm, for example ``EAGLE3``.
        model_id: Name of the checkpoint folder.
        fingerprint: Fingerprint of the weights.
        vocab_size: Size of the target vocabulary that the strategy was made for.
        feature_size: Width of the feature rows that the strategy reads; 0 if the strategy reads no features.
        max_len: Largest number of tokens of a session.
        row_source: The input from which the rows of the strategy's KV are computed.
        hidden_size: Hidden size of the strategy's model; 0 without a model.
        rewind: When a session is reopened, the number of rows of the common prefix to compute again, in
            addition to the last row of that prefix.
        extend_rows: Largest number of rows per pass over prompts.
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
    """Page counts of the strategy's own KV pool; all zero without a pool."""

    total: int
    free: int
    held: int


class DraftStrategy(Protocol):
    """One way of drafting.

    The engine thread makes all calls. Only `info` and `feature_spec`, which never change, may be used from
    other threads.

    Attributes:
        info: Description of the strategy.
        rounds: The strategy's recorded rounds, which extend sessions and grow trees in one launch on the
            device; None if the strategy has no recorded rounds.
    """

    info: StrategyInfo
    rounds: DeviceGrowth | None

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """Return which hidden states the target must capture as features.

        Without a target, the result has only the properties that do not depend on the target.

        Raises:
            CheckpointError: The strategy does not fit the target. The message names the key and the fix.
        """
        ...

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the target's tensors that are still to be lent.

        Drafting starts when no tensor is missing.
        """
        ...

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Store one of the missing tensors.

        Raises:
            CheckpointError: The tensor is not missing, or its shape is wrong.
        """
        ...

    def reserve(self, session: Session) -> bool:
        """Reserve the memory to extend the session and to grow the requested tree.

        Returns:
            False if too little memory is free now.
        """
        ...

    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        """Add new rows of reserved sessions to the KV, except the last `keep` rows of each session.

        At most `max_rows` rows are added in all, so a long prompt needs several calls.
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
