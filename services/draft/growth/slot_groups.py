"""Runs drafting passes whose input tokens and features are on the device and reach the host one round late.

The input of a pass is the tokens and features of the previous round. A target in the same process keeps them
in its slots. A target in another process sends them as a round state. In both cases, the draft's host
receives the tokens and features one round later. The fields of a `Session` therefore describe an older state
than the device has:

    tokens       committed tokens, up to the last round that the host has read
    cached_rows  number of rows of the draft's KV, up to the last round that the host has read
    features     feature rows that the target has supplied and whose K/V is not computed yet
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.services.draft.growth.growth_memory import GrowthMemory
from outrider.services.draft.growth.page_tables import PageTable
from outrider.services.draft.growth.tree_grower import GrowthInputs, GrowthSize
from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import RowSource, Session
from outrider.shared.kv.pages import PageLease
from outrider.shared.spec.device_drafter import SeatedGroup
from outrider.shared.spec.fence import extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape


class SlotGroups:
    """Prepares rounds of sessions whose newest rows are on the device (`shared.spec.device_drafter`).

    Args:
        memory: Resources shared by all rounds.
        now: Returns monotonic seconds.
    """

    def __init__(self, memory: GrowthMemory, now: Callable[[], float]) -> None:
        self._memory = memory
        self._now = now

    def lacking(self, session: Session) -> range:
        """Return the positions of the feature rows that a session needs; see `DeviceDrafter.lacking`."""
        if session.row_source is not RowSource.FEATURES:
            return range(0)
        return range(min(session.features.contiguous, session.num_rows), session.num_rows)

    @torch.inference_mode()
    def seat(
        self,
        sessions: Sequence[Session | None],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
        place: int = 0,
    ) -> SessionGroup:
        """Prepare sessions for one round; see `DeviceDrafter.seat`.

        A round may have several groups. Give each group its own value of `place` if all groups are prepared
        before the inputs of the first group are copied to the device.
        """
        memory, bounded, longest = self._memory, shape.bounded(), 1
        leases: list[PageLease | None] = []
        refused: list[int] = []
        needs = [memory.tokens_needed(upper, bounded) for upper in committed_upper]
        # If one lease grows, grow every lease. The table is rewritten in any case, and spare pages in every
        # lease avoid further rewrites for many rounds.
        grows = any(
            session is not None and session.lease is not None and not memory.holds(session.lease, needed)
            for session, needed in zip(sessions, needs, strict=True)
        )
        for index, (session, needed) in enumerate(zip(sessions, needs, strict=True)):
            lease = None if session is None else session.lease
            if (
                session is None
                or lease is None
                or memory.tables.width_for(needed) is None
                or not memory.reserve(lease, needed, grows=grows)
            ):
                refused.append(index)
                leases.append(None)
                continue
            session.engaged = True
            session.last_state = None
            longest = max(longest, needed)
            leases.append(lease)
        width = memory.tables.width_for(longest)
        assert width is not None, "sessions that the pool cannot hold are refused"
        table = memory.tables.find(batch_size, width, place)
        size = GrowthSize(batch_size, columns, bounded.depth, bounded.topk, shape.max_nodes)
        budgets = memory.budgets(batch_size, bounded.max_nodes)
        return SessionGroup(memory, size, table, leases, budgets, refused)

    def committed(self, session: Session, tokens: Sequence[int], *, drafted: bool) -> None:
        """Receive the tokens of a pass; see `DeviceDrafter.committed`."""
        if drafted:
            # The round has added all rows before these tokens to the KV.
            session.cached_rows = session.num_rows
        session.tokens.extend(tokens)
        session.prefix_hash = extend_prefix_hash(session.prefix_hash, tokens)
        if session.row_source is RowSource.FEATURES:
            session.features = FeatureQueue(session.cached_rows)
        session.last_used_s = self._now()


class SessionGroup(SeatedGroup):
    """Sessions that draft together in one round.

    Args:
        memory: Resources that all rounds of the draft model share.
        size: Sizes of the round.
        table: Page tables of the sessions. Groups of equal sizes share this tensor and use it in turn.
        leases: The KV lease of each session; None for a session that cannot draft in this round.
        budgets: ``[G] int32``, the node limit of each session's tree.
        refused: Indices of the sessions that cannot draft in this round.
    """

    def __init__(
        self,
        memory: GrowthMemory,
        size: GrowthSize,
        table: PageTable,
        leases: Sequence[PageLease | None],
        budgets: torch.Tensor,
        refused: Sequence[int],
    ) -> None:
        self._memory = memory
        self._size = size
        self._table = table
        self._leases = leases
        self._budgets = budgets
        self.refused = refused
        self.key: Hashable = table.tensor.data_ptr()

    def stage(self) -> None:
        """Prepare the copy of the page table. `load` enqueues this copy."""
        self._table.update(self._leases, later=True)

    def load(self) -> None:
        self._table.update(self._leases)

    @torch.inference_mode()
    def draft(self, rows: GroupRows) -> DraftBatch:
        inputs = GrowthInputs(
            committed_lens=rows.committed_lens,
            counts=rows.counts,
            tokens=rows.tokens,
            features=rows.features,
            max_nodes=self._budgets,
            page_table=self._table.tensor,
            places=self._table.places,
            temperature=rows.temperature,
            seeds=rows.seeds,
            choices=rows.choices,
        )
        return self._memory.grower.draft(inputs, self._size).trees
