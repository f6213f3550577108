"""The seam between the draft engine and the ways of drafting.

A strategy may be a recurrent head (EAGLE), layers of the target's checkpoint (MTP), a model of its own, a table of n-grams, or a block
drafter: the engine knows only that it can take in sessions' new rows and answer with trees.
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
"""Rows per pass over prompts: bounds memory, and how long other sessions wait."""


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """What a strategy is, for the handshake and the logs.

    Attributes:
        algorithm: E.g. ``EAGLE3``.
        model_id: Name of the checkpoint folder.
        fingerprint: Of its weights.
        vocab_size: The target's vocabulary that it was made for.
        feature_size: Width of the feature rows that it takes; 0 if it needs none.
        max_len: Tokens of a session that it can follow.
        row_source: What the rows of its KV are made of.
        hidden_size: Of its model; 0 without one.
        rewind: Rows, besides the last, of a session's common prefix that are computed again when it is opened again.
        extend_rows: Rows per pass over prompts.
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
    """Pages of the strategy's own KV pool; all zero where there is none."""

    total: int
    free: int
    held: int


class DraftStrategy(Protocol):
    """One way of drafting. Called on the engine thread only, but for `info` and `feature_spec`, which never change.

    Attributes:
        info: What it is.
        rounds: Its rounds in one go on the device; None where it has none.
    """

    info: StrategyInfo
    rounds: DeviceGrowth | None

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """Return what this target has to capture; without a target, what does not depend on it.

        Raises:
            CheckpointError: the strategy does not fit the target; names the key and what to change.
        """
        ...

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of the target's tensors that are still to be lent; drafting starts when none is left."""
        ...

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Take one of the missing tensors.

        Raises:
            CheckpointError: it is not missing, or its shape is wrong.
        """
        ...

    def reserve(self, session: Session) -> bool:
        """Hold the memory that extending the session and growing its asked tree take; False when there is not enough now."""
        ...

    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        """Take in new rows of reserved sessions, at most `max_rows` in all (a prompt takes several calls), but not the last `keep`."""
        ...

    def propose(self, sessions: Sequence[Session]) -> DraftBatch:
        """Grow one tree per session. They are extended, reserved and asked for trees of equal depth and topk."""
        ...

    def release(self, session: Session) -> None:
        """Free what is held for a session."""
        ...

    def pages(self) -> Pages:
        """Return the state of the KV pool."""
        ...
