"""Rounds of the in-process draft that stay on the device: `ResidentBatch` over the sessions of an engine.

Between `enter` and `leave` the sessions' fresh rows live in the engine's `RoundState` and nowhere else: the host learns tokens one round
late, and takes the last round's features back when it leaves.

    session      on the host's way                    within rounds
    tokens       all committed                        those of rounds that were told (`committed`)
    cached_rows  rows in the KV                       rows below the last told round, which the round after it extends by
    features     queue of what is not in the KV yet   nothing: the state holds it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from outrider.services.draft.growth.draft_round import GrowthInputs, GrowthSize, RoundDrafter, round_rows
from outrider.services.draft.growth.host_grower import scratch_rows
from outrider.services.draft.growth.page_tables import PageTable, PageTables
from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import RowSource, Session
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.fence import extend_prefix_hash
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape

SPARE_TOKENS = 64
"""Tokens that a lease grows by beyond what is needed, so that a page table is not rewritten at every round."""


class RoundMemory:
    """What rounds share beside the model: its pool, page tables that do not move, and constants.

    Args:
        drafter: Runs the rounds.
        pool: The model's KV.
        lead: See `RoundModel.lead`.
    """

    def __init__(self, drafter: RoundDrafter, pool: KVPool, lead: int) -> None:
        self.drafter = drafter
        self.pool = pool
        self.tables = PageTables(pool)
        self.lead = lead
        self._budgets: dict[tuple[int, int], torch.Tensor] = {}

    def budgets(self, bs: int, nodes: int) -> torch.Tensor:
        """Return ``[bs] int32`` of that many nodes; it never moves or changes."""
        if (bs, nodes) not in self._budgets:
            with torch.inference_mode(False):
                self._budgets[bs, nodes] = torch.full(
                    (bs,), nodes, dtype=torch.int32, device=self.pool.device
                )
        return self._budgets[bs, nodes]

    def tokens_needed(self, committed_len: int, shape: DraftShape) -> int:
        """Return the tokens that a round takes of a sequence's lease."""
        return committed_len - 1 + self.lead + scratch_rows(shape.depth, shape.topk)

    def holds(self, lease: PageLease, num_tokens: int) -> bool:
        """Whether a lease holds so many tokens."""
        return num_tokens <= len(lease.pages) * self.pool.page_size

    def reserve(self, lease: PageLease, num_tokens: int, *, grows: bool = False) -> bool:
        """Grow a lease until it holds so many tokens, and some more if there is room; with `grows` even if it holds them already."""
        if self.holds(lease, num_tokens) and not grows:
            return True
        return self.pool.reserve(lease, num_tokens + SPARE_TOKENS) or self.pool.reserve(lease, num_tokens)


class SessionRounds:
    """`ResidentBatch` of the sessions of one batch. Without sessions all rows are idle: that is what graphs are recorded with.

    Args:
        memory: Shared with all rounds.
        sessions: In the order of the state's rows; their leases hold what the first round needs.
        shape: Of every tree.
        state: The engine's.
        now: Monotonic seconds.

    Attributes:
        key: See `ResidentBatch.key`: the page table. All else that is read besides the state does not move.
    """

    def __init__(
        self,
        memory: RoundMemory,
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
        self._counts = [session.num_rows - session.cached_rows for session in sessions]
        self._later = False
        self._round, self._budgets = self._sized(state)
        longest = max((session.committed_len for session in sessions), default=1)
        self._table = self._table_for(memory.tokens_needed(longest, self._bounded))
        self._table.lent = bool(sessions)
        self.key: Hashable = self._table.tensor.data_ptr()
        self._table.update(self._leases())
        for session in sessions:
            session.engaged = True

    @classmethod
    def enter(
        cls,
        memory: RoundMemory,
        sessions: Sequence[Session],
        shape: DraftShape,
        state: RoundState,
        now: Callable[[], float],
    ) -> SessionRounds:
        """Start rounds: the sessions' fresh rows, 1 to R of each, go into the state."""
        rounds = cls(memory, sessions, shape, state, now)
        _fill(state, sessions)
        return rounds

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        """See `ResidentBatch.reserve`."""
        memory, longest = self._memory, 1
        rows = [
            (one.lease, upper)
            for one, upper in zip(self._sessions, committed_upper, strict=True)
            if one is not None
        ]
        needs = [
            (lease, memory.tokens_needed(upper, self._bounded)) for lease, upper in rows if lease is not None
        ]
        assert len(needs) == len(rows), "sessions in rounds hold a lease"
        grows = any(
            not memory.holds(lease, needed) for lease, needed in needs
        )  # the table is rewritten then: for long, if all grow
        for lease, needed in needs:
            if memory.tables.width_for(needed) is None or not memory.reserve(lease, needed, grows=grows):
                return False
            longest = max(longest, needed)
        if longest > self._table.tensor.shape[1] * memory.pool.page_size:
            self._table.lent = False
            self._table = self._table_for(longest)
            self._table.lent = True
            self.key = self._table.tensor.data_ptr()
        self._table.update(self._leases(), later=self._later)
        return True

    def write_later(self) -> None:
        """Leave it to `write` from now on to have the device see the pages of `reserve`."""
        self._later = True

    def write(self) -> None:
        """See above, in stream order."""
        self._table.flush()

    @torch.inference_mode()
    def draft(self, state: RoundState) -> DraftBatch:
        """See `ResidentBatch.draft`."""
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
        return self._memory.drafter.draft(inputs, self._round).trees

    def committed(self, tokens_per_row: Sequence[Sequence[int]]) -> None:
        """See `ResidentBatch.committed`."""
        now = self._now()
        for row, (session, tokens) in enumerate(zip(self._sessions, tokens_per_row, strict=True)):
            if session is None or not tokens:
                continue
            # The round that chose these tokens has extended by all rows before them.
            session.cached_rows = session.num_rows
            session.tokens.extend(tokens)
            session.prefix_hash = extend_prefix_hash(session.prefix_hash, tokens)
            session.features = FeatureQueue(session.cached_rows)
            session.last_used_s = now
            self._counts[row] = len(tokens)

    def retire(self, rows: Sequence[int]) -> None:
        """See `ResidentBatch.retire`."""
        for row in rows:
            session = self._sessions[row]
            if session is not None:
                session.engaged = False
                self._sessions[row] = None

    @torch.inference_mode()
    def move(self, rows: Sequence[int], state: RoundState) -> bool:
        """See `ResidentBatch.move`: the pages go into the table of the new size, the sessions stay as they are."""
        width = self._table.tensor.shape[1]
        self._sessions = [self._sessions[row] for row in rows]
        self._counts = [self._counts[row] for row in rows]
        self._state = state
        self._round, self._budgets = self._sized(state)
        self._table.lent = False
        self._table = self._memory.tables.find(state.bs, width)
        self._table.lent = True
        self.key = self._table.tensor.data_ptr()
        self._table.update(self._leases())
        return True

    @torch.inference_mode()
    def leave(self) -> None:
        """See `ResidentBatch.leave`."""
        for row, session in enumerate(self._sessions):
            if session is None:
                continue
            session.engaged = False
            # What the tree of the last round grew from is not told; the next extension makes it anew, of at least the root's row.
            session.last_state = None
            if session.row_source is RowSource.FEATURES:
                session.features = FeatureQueue(session.cached_rows)
                session.features.add(
                    session.cached_rows, self._state.features[row, : self._counts[row]].clone()
                )
        self._sessions = [None] * len(self._sessions)
        self._table.lent = False

    def _sized(self, state: RoundState) -> tuple[GrowthSize, torch.Tensor]:
        """Return the host's numbers of rounds with this state, and every row's budget of nodes."""
        bounded = self._bounded
        rows = min(round_rows(bounded), state.columns)
        shape = GrowthSize(state.bs, rows, bounded.depth, bounded.topk, self._shape.max_nodes)
        return shape, self._memory.budgets(state.bs, bounded.max_nodes)

    def _leases(self) -> list[PageLease | None]:
        return [None if session is None else session.lease for session in self._sessions]

    def _table_for(self, num_tokens: int) -> PageTable:
        width = self._memory.tables.width_for(num_tokens)
        assert width is not None, "who enters or reserves has asked whether a sequence may be that long"
        return self._memory.tables.find(self._state.bs, width)


def _fill(state: RoundState, sessions: Sequence[Session]) -> None:
    """Move the sessions' fresh rows into the first rows of a state, in stream order."""
    counts = [session.num_rows - session.cached_rows for session in sessions]
    fed = [session.row_source is RowSource.FEATURES for session in sessions]
    state.fill(
        [
            session.tokens[session.committed_len - count :]
            for session, count in zip(sessions, counts, strict=True)
        ],
        [
            [session.features.take(count)] if takes_features else []
            for session, count, takes_features in zip(sessions, counts, fed, strict=True)
        ],
    )
    for session, takes_features in zip(sessions, fed, strict=True):
        if takes_features:
            session.features = FeatureQueue(session.cached_rows)
