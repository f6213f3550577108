"""The drafter of a server without a draft, and what every drafter answers when it has nothing to offer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.shared.spec.drafter import Commits, DrafterState, FeatureSpec, ProposalRequest, SequenceOpen
from outrider.shared.spec.tree import DraftBatch
from outrider.shared.spec.trees import root_trees


class NoDrafter:
    """Proposes nothing, follows nothing, captures nothing: plain decoding."""

    device_resident = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def describe(self) -> tuple[str, str]:
        """Return the algorithm and the model id."""
        return "none", ""

    def feature_spec(self) -> FeatureSpec | None:
        """See `Drafter.feature_spec`."""
        return None

    def state(self) -> DrafterState:
        """See `Drafter.state`."""
        return DrafterState.NONE

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """See `Drafter.open`."""

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """See `Drafter.features`."""

    def commit(self, result: Commits) -> None:
        """See `Drafter.commit`."""

    def announce(self, request: ProposalRequest) -> None:
        """See `Drafter.announce`."""

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """See `Drafter.propose`."""
        return root_trees([row.root_token for row in request.rows], self._device)

    def wants_reopen(self) -> Sequence[int]:
        """See `Drafter.wants_reopen`."""
        return ()

    def fallback_reason(self, session_id: int) -> str:
        """See `Drafter.fallback_reason`."""
        return "no_draft"

    def close(self, session_ids: Sequence[int]) -> None:
        """See `Drafter.close`."""

    def shutdown(self) -> None:
        """See `Drafter.shutdown`."""
