"""Memory that all rounds on the device share: the KV pool, page tables at fixed addresses, and constants."""

from __future__ import annotations

import torch

from outrider.services.draft.growth.page_tables import PageTables
from outrider.services.draft.growth.tree_grower import TreeGrower, scratch_rows
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import DraftShape

SPARE_TOKENS = 64
"""Number of extra tokens by which a lease grows, so that a page table is not rewritten in every round."""


class GrowthMemory:
    """Resources that all rounds of a draft model share: KV pool, page tables at fixed addresses, constants.

    Args:
        grower: Extends sequences and grows their trees.
        pool: KV pool of the model.
        lead: The model's `DraftModel.lead`.
    """

    def __init__(self, grower: TreeGrower, pool: KVPool, lead: int) -> None:
        self.grower = grower
        self.pool = pool
        self.tables = PageTables(pool)
        self.lead = lead
        self._budgets: dict[tuple[int, int], torch.Tensor] = {}

    def budgets(self, bs: int, nodes: int) -> torch.Tensor:
        """Return a constant tensor ``[bs] int32`` at a fixed address, filled with `nodes`."""
        if (bs, nodes) not in self._budgets:
            with torch.inference_mode(False):
                self._budgets[bs, nodes] = torch.full(
                    (bs,), nodes, dtype=torch.int32, device=self.pool.device
                )
        return self._budgets[bs, nodes]

    def tokens_needed(self, committed_len: int, shape: DraftShape) -> int:
        """Return the number of tokens for which a sequence's lease needs pages in one round."""
        return committed_len - 1 + self.lead + scratch_rows(shape.depth, shape.topk)

    def holds(self, lease: PageLease, num_tokens: int) -> bool:
        """True if a lease has pages for this many tokens."""
        return num_tokens <= len(lease.pages) * self.pool.page_size

    def reserve(self, lease: PageLease, num_tokens: int, *, grows: bool = False) -> bool:
        """Grow a lease of KV pages to this many tokens, plus `SPARE_TOKENS` if there is room.

        Args:
            lease: The lease.
            num_tokens: Number of tokens that the lease must cover.
            grows: If False, a lease that already has enough pages is not changed.

        Returns:
            False if the KV pool is full.
        """
        if self.holds(lease, num_tokens) and not grows:
            return True
        return self.pool.reserve(lease, num_tokens + SPARE_TOKENS) or self.pool.reserve(lease, num_tokens)
