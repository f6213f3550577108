"""The drafter of a server without a draft, which makes every round plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.shared.spec.drafter import (
    Commits,
    Drafter,
    DrafterState,
    FeatureSpec,
    ProposalRequest,
    SequenceOpen,
)
from outrider.shared.spec.tree import DraftBatch
from outrider.shared.spec.trees import root_trees


class NoDrafter(Drafter):
    """A drafter that proposes only single-node trees, follows no sequence and wants no features."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def describe(self) -> tuple[str, str]:
        """Return the algorithm ("none") and an empty model id."""
        return "none", ""

    def feature_spec(self) -> FeatureSpec | None:
        """Return None, because this drafter wants no features."""
        return None

    def state(self) -> DrafterState:
        """Return `DrafterState.NONE`."""
        return DrafterState.NONE

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """Do nothing."""

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Do nothing."""

    def commit(self, result: Commits) -> None:
        """Do nothing."""

    def announce(self, request: ProposalRequest) -> None:
        """Do nothing."""

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """Return single-node trees."""
        return root_trees([row.root_token for row in request.rows], self._device)

    def wants_reopen(self) -> Sequence[int]:
        """Return no session."""
        return ()

    def fallback_reason(self, session_id: int) -> str:
        """Return "no_draft"."""
        return "no_draft"

    def close(self, session_ids: Sequence[int]) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""
