"""The drafter of a server without a draft, and what every drafter answers when it has nothing to offer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.shared.spec.drafter import Commits, DrafterState, FeatureSpec, ProposalRequest, SequenceOpen
from outrider.shared.spec.tree import DraftBatch


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


def root_trees(root_tokens: Sequence[int], device: torch.device) -> DraftBatch:
    """Return trees of one node each: a step of plain decoding."""
    bs = len(root_tokens)
    tokens = torch.tensor(root_tokens, dtype=torch.int32, device=device).view(bs, 1)
    return DraftBatch(
        tokens=tokens,
        parents=torch.full_like(tokens, -1),
        depths=torch.zeros_like(tokens),
        num_nodes=torch.ones(bs, dtype=torch.int32, device=device),
        ancestors=torch.ones((bs, 1, 1), dtype=torch.int32, device=device),
    )


def scatter_trees(drafts: DraftBatch, rows: Sequence[int], root_tokens: Sequence[int]) -> DraftBatch:
    """Place trees into a larger batch: tree i becomes row ``rows[i]``, every other row a tree of one node."""
    if len(rows) == len(root_tokens):
        return drafts
    bs, width, words = len(root_tokens), drafts.tokens.shape[1], drafts.ancestors.shape[2]
    device = drafts.tokens.device
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    tokens = torch.zeros((bs, width), dtype=torch.int32, device=device)
    tokens[:, 0] = torch.tensor(root_tokens, dtype=torch.int32, device=device)
    ancestors = torch.zeros((bs, width, words), dtype=torch.int32, device=device)
    ancestors[:, 0, 0] = 1
    logprobs = None
    if drafts.logprobs is not None:
        logprobs = torch.zeros((bs, width), device=device).index_copy_(0, index, drafts.logprobs)
    return DraftBatch(
        tokens=tokens.index_copy_(0, index, drafts.tokens),
        parents=torch.full((bs, width), -1, dtype=torch.int32, device=device).index_copy_(
            0, index, drafts.parents
        ),
        depths=torch.zeros((bs, width), dtype=torch.int32, device=device).index_copy_(
            0, index, drafts.depths
        ),
        num_nodes=torch.ones(bs, dtype=torch.int32, device=device).index_copy_(0, index, drafts.num_nodes),
        ancestors=ancestors.index_copy_(0, index, drafts.ancestors),
        logprobs=logprobs,
        draft_ms=drafts.draft_ms,
    )
