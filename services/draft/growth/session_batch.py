"""Rounds of a fixed batch that stay on the device, for targets in other processes (a `ResidentBatch`).

In such rounds, the tokens and features of one round are the next round's input on the GPU; see
`shared.spec.resident`. Before each round, this module reserves KV pages in each session's `PageLease`. It
updates the sessions one round late. `slot_rounds` also uses `GrowthMemory`, for a target in the same process.

During the rounds, the fresh rows (tokens and features chosen by the last round) exist only in the target's
`RoundState`. When the rounds end, the target sends the draft every row that it lacks.

    session's    in rounds through the host        in rounds on the device
    tokens       all committed tokens              tokens of the rounds reported by `committed`
    cached_rows  rows in the KV                    all rows but those of the last reported round
    features     queue of rows not yet in the KV   empty: the features are in the state
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from outrider.services.draft.growth.page_tables import PageTable, PageTables
from outrider.services.draft.growth.tree_grower import (
    GrowthInputs,
    GrowthSize,
    TreeGrower,
    max_round_rows,
    scratch_rows,
)
from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import Session
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.fence import extend_prefix_hash
from outrider.shared.spec.resident import ResidentBatch, RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape

SPARE_TOKENS = 64
"""Number of extra tokens by which a lease grows, so that a page table is not rewritten in every round."""


class GrowthMemory:
    """Resources that all rounds of a model share: the KV pool, page tables at fixed addresses, and constants.

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
        """Grow a lease to this many tokens, plus `SPARE_TOKENS` if there is room.

        Without `grows`, a lease that already has enough pages is not changed.

        Returns:
            False if the pool is full.
        """
        if self.holds(lease, num_tokens) and not grows:
            return True
        return self.pool.reserve(lease, num_tokens + SPARE_TOKENS) or self.pool.reserve(lease, num_tokens)


class SessionBatch(ResidentBatch):
    """The sessions of one batch in rounds on the device.

    With an empty list of sessions, all rows are idle. Graphs are recorded with such rounds.

    Args:
        memory: Resources shared by all rounds.
        sessions: The sessions, in the order of the state's rows. Their leases have enough pages for the first
            round.
        shape: Shape of every tree.
        state: The engine's state.
        now: Returns monotonic seconds.

    Attributes:
        key: Address of the page table. Apart from the state, the page table is the only input whose address
            can change.
    """

    def __init__(
        self,
        memory: GrowthMemory,
        sessions: Sequence[Session],
        shape: DraftShape,
        state: RoundState,
        now: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._sessions: list[Session | None] = list(sessions)
        self._shape = shape
        self._bounded = shape.bounded()
        self._state = state
        self._now = now
        self._round, self._budgets = self._sized(state)
        longest = max((session.committed_len for session in sessions), default=1)
        self._table = self._table_for(memory.tokens_needed(longest, self._bounded))
        self._table.lent = bool(sessions)
        self.key: Hashable = self._table.tensor.data_ptr()
        self._table.update(self._leases())
        for session in sessions:
            session.engaged = True

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        memory, longest = self._memory, 1
        rows = [
            (one.lease, upper)
            for one, upper in zip(self._sessions, committed_upper, strict=True)
            if one is not None
        ]
        needs = [
            (lease, memory.tokens_needed(upper, self._bounded)) for lease, upper in rows if lease is not None
        ]
        assert len(needs) == len(rows), "sessions in rounds must have a lease"
        # If one lease grows, grow every lease. The table is rewritten anyway, and the spare pages then avoid
        # further rewrites for many rounds.
        grows = any(not memory.holds(lease, needed) for lease, needed in needs)
        for lease, needed in needs:
            if memory.tables.width_for(needed) is None or not memory.reserve(lease, needed, grows=grows):
                return False
            longest = max(longest, needed)
        if longest > self._table.tensor.shape[1] * memory.pool.page_size:
            self._table.lent = False
            self._table = self._table_for(longest)
            self._table.lent = True
            self.key = self._table.tensor.data_ptr()
        self._table.update(self._leases(), later=True)
        return True

    def write(self) -> None:
        """Copy to the device, in stream order, the pages that `reserve` has added."""
        self._table.flush()

    @torch.inference_mode()
    def draft(self, state: RoundState) -> DraftBatch:
        inputs = GrowthInputs(
            committed_lens=state.committed_lens,
            counts=state.counts,
            tokens=state.tokens,
            features=state.features,
            max_nodes=self._budgets,
            page_table=self._table.tensor,
            temperature=state.temperature,
            seeds=state.seeds,
            choices=state.choices,
        )
        return self._memory.grower.draft(inputs, self._round).trees

    def committed(self, tokens_per_row: Sequence[Sequence[int]]) -> None:
        now = self._now()
        for session, tokens in zip(self._sessions, tokens_per_row, strict=True):
            if session is None or not tokens:
                continue
            # The round that chose these tokens has added all rows before them to the KV.
            session.cached_rows = session.num_rows
            session.tokens.extend(tokens)
            session.prefix_hash = extend_prefix_hash(session.prefix_hash, tokens)
            session.features = FeatureQueue(session.cached_rows)
            session.last_used_s = now

    def retire(self, rows: Sequence[int]) -> None:
        for row in rows:
            session = self._sessions[row]
            if session is not None:
                session.engaged = False
                self._sessions[row] = None

    def leave(self) -> None:
        self.retire(range(len(self._sessions)))
        self._table.lent = False

    def _sized(self, state: RoundState) -> tuple[GrowthSize, torch.Tensor]:
        """Return the size of rounds with this state, and the node limit of every row."""
        bounded = self._bounded
        rows = min(max_round_rows(bounded), state.columns)
        shape = GrowthSize(state.bs, rows, bounded.depth, bounded.topk, self._shape.max_nodes)
        return shape, self._memory.budgets(state.bs, bounded.max_nodes)

    def _leases(self) -> list[PageLease | None]:
        return [None if session is None else session.lease for session in self._sessions]

    def _table_for(self, num_tokens: int) -> PageTable:
        width = self._memory.tables.width_for(num_tokens)
        assert width is not None, "the caller or `reserve` must check that the pool can hold the sequence"
        return self._memory.tables.find(self._state.bs, width)
