"""Base class of strategies with a model and a paged KV pool: reserves pages, grows trees, frees pages.

The lease of a session covers KV slots. The table shows the contents of these slots, and the event that frees
them:

    KV slots                         content                         freed by
    [0, cached_rows)                 rows of committed tokens        release, or eviction of stored pages
    the next scratch_rows slots      rows of the tree being grown    release; overwritten by the next extend
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.growth.draft_model import DraftModel
from outrider.services.draft.growth.tree_grower import GrowthInputs, GrowthSize, scratch_rows
from outrider.services.draft.sessions.chunks import RowChunk
from outrider.services.draft.sessions.session import Session, inherit
from outrider.services.draft.sessions.stored_rows import StoredRows
from outrider.services.draft.strategies.base import DraftStrategy, Pages, StrategyInfo
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.seeds import signed_seed
from outrider.shared.spec.tree import DraftBatch, DraftShape

CUDA_EXTEND_ROWS = 8192
"""Largest number of rows per pass over prompts on CUDA. The limit is higher than on a CPU, because in a GPU
pass over few rows, the host needs more time than the device."""


class PagedStrategy(DraftStrategy, ABC):
    """The common part of drafting strategies with a model: KV pool, page leases and growth of trees.

    A subclass implements `extend`. It also defines the features and tensors that it needs from the target.

    Args:
        info: Description of the strategy.
        model: The draft model.
        pool: The draft model's KV pool.
        attention: The draft model's attention backend.
    """

    def __init__(
        self,
        info: StrategyInfo,
        model: DraftModel,
        pool: KVPool,
        attention: AttentionBackend,
    ) -> None:
        self.info = info
        growth = DeviceGrowth.make(model, attention, pool, info.feature_size)
        self.growth: DeviceGrowth | None = growth
        self._grower = growth.memory.grower
        self._pool = pool
        self._stored = StoredRows(pool, info.rewind)
        self._attention = attention
        self._device = model.device

    @abstractmethod
    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec: ...

    @abstractmethod
    def missing(self) -> Mapping[str, tuple[int, ...]]: ...

    @abstractmethod
    def lend(self, name: str, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None: ...

    def begin(self, session: Session, known: Session | None, kept: int, stored_len: int) -> int:
        shares = self._stored.shares(session)
        if known is not None and not shares and not self._stored.shares(known):
            return inherit(session, known, kept, stored_len)
        if known is not None:
            # The rows that the two sessions have in common are stored now, and found again.
            self.release(known)
        return self._stored.begin(session, max(kept, stored_len)) if shares else 0

    def reserve(self, session: Session) -> bool:
        shape = session.ask.shape if session.ask is not None else None
        scratch = scratch_rows(shape.depth, shape.topk) if shape is not None else 0
        # Reserve at least one page, because `StageStates` needs it (`PageLease.first_new_page`).
        wanted = max(1, session.cached_rows + session.extendable_rows + scratch)
        if session.lease is None:
            return self._stored.lease(session, self._pool.pages_for(wanted))
        return self._pool.reserve(session.lease, wanted)

    @torch.inference_mode()
    def propose(self, sessions: Sequence[Session]) -> DraftBatch:
        shapes = [session.ask.shape.bounded() for session in sessions if session.ask is not None]
        states = [session.last_state for session in sessions if session.last_state is not None]
        assert len(shapes) == len(states) == len(sessions), (
            "propose needs extended sessions that were asked for a tree"
        )
        nodes = [shape.max_nodes for shape in shapes]
        leases = [session.lease for session in sessions if session.lease is not None]
        integers = [
            [session.committed_len for session in sessions],
            [1] * len(sessions),
            [session.tokens[-1] for session in sessions],
            nodes,
            [session.choice_index for session in sessions],
            [lease.first_new_page for lease in leases],
        ]
        committed_lens, counts, roots, max_nodes, choices, places = upload(
            integers, torch.int32, self._device
        )
        inputs = GrowthInputs(
            committed_lens=committed_lens,
            counts=counts,
            tokens=roots[:, None],
            features=roots.new_empty(0),
            max_nodes=max_nodes,
            page_table=self._pool.page_table(leases),
            places=places,
            temperature=upload([one.temperature for one in sessions], torch.float32, self._device),
            seeds=upload([signed_seed(one.seed) for one in sessions], torch.int64, self._device),
            choices=choices,
        )
        size = GrowthSize(len(sessions), 1, max(1, shapes[0].depth), shapes[0].topk, max(nodes))
        return self._grower.grow(inputs, size, torch.stack(states)).trees

    def release(self, session: Session) -> None:
        self._stored.end(session)
        session.last_state = None

    def pages(self) -> Pages:
        total, free = self._pool.num_pages, self._pool.allocator.available_pages
        return Pages(total, free, total - free)

    def _extended(self, chunks: Sequence[RowChunk]) -> bool:
        """If the recorded graph fits these chunks, extend by replaying it. Return True if the graph ran."""
        extension = self.growth.extension if self.growth is not None else None
        if extension is None or not extension.takes(chunks):
            return False
        extension.run(chunks[0])
        return True


def longest_session(pool: KVPool, max_shape: DraftShape) -> int:
    """Return the largest session, in tokens, that fits into an empty pool together with the largest tree."""
    return max(2, pool.capacity_tokens - scratch_rows(max_shape.depth, max_shape.topk))
