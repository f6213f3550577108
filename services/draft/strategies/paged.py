"""Base class of strategies with a model and a paged KV pool: reserves pages, grows trees, frees pages.

Contents of the slots in a session's lease, and the events that free the slots:

    token index                      content                         freed by
    [0, cached_rows)                 rows of committed tokens        release of the lease
    [cached_rows, + scratch_rows)    rows of the tree being grown    release; overwritten by the next extend
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.growth.growing_model import GrowingModel
from outrider.services.draft.growth.host_grower import Coupling, GrowBatch, HostGrower, scratch_rows
from outrider.services.draft.growth.round_model import RoundModel
from outrider.services.draft.sessions.chunks import (
    RowChunk,
)
from outrider.services.draft.sessions.session import Session
from outrider.services.draft.strategies.base import DraftStrategy, Pages, StrategyInfo
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.seeds import signed_seed
from outrider.shared.spec.tree import DraftBatch, DraftShape

CUDA_EXTEND_ROWS = 8192
"""Largest number of rows per pass over prompts on CUDA. This limit exceeds the CPU's limit because, for a GPU
pass over few rows, the host needs longer than the device."""


class PagedStrategy(DraftStrategy, ABC):
    """The common part of strategies with a model: a pool, leases and trees.

    A subclass implements `extend`, and defines the features and tensors that it needs from the target.

    Args:
        info: Description of the strategy.
        model: The model that grows the trees.
        pool: The model's KV pool.
        attention: The model's attention backend.
        round_model: The model in the form that recorded rounds need; None if the model has no recorded
            rounds.
        dtype: Type of the features.
    """

    def __init__(
        self,
        info: StrategyInfo,
        model: GrowingModel,
        pool: KVPool,
        attention: AttentionBackend,
        round_model: RoundModel | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.info = info
        self.rounds: DeviceGrowth | None = None
        if round_model is not None:
            self.rounds = DeviceGrowth.make(round_model, attention, pool, info.feature_size, dtype)
        self._pool = pool
        self._attention = attention
        self._device = model.device
        self._grower = HostGrower(model, attention, pool)

    @abstractmethod
    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec: ...

    @abstractmethod
    def missing(self) -> Mapping[str, tuple[int, ...]]: ...

    @abstractmethod
    def lend(self, name: str, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None: ...

    def reserve(self, session: Session) -> bool:
        shape = session.ask.shape if session.ask is not None else None
        scratch = scratch_rows(shape.depth, shape.topk) if shape is not None else 0
        wanted = session.cached_rows + session.extendable_rows + scratch
        if session.lease is None:
            session.lease = self._pool.lease(wanted)
            return session.lease is not None
        return self._pool.reserve(session.lease, wanted)

    @torch.inference_mode()
    def propose(self, sessions: Sequence[Session]) -> DraftBatch:
        shapes = [session.ask.shape.bounded() for session in sessions if session.ask is not None]
        states = [state for state in map(self._root_state, sessions) if state is not None]
        assert len(shapes) == len(states) == len(sessions), (
            "propose needs extended sessions that were asked for a tree"
        )
        batch = GrowBatch(
            leases=[session.lease for session in sessions if session.lease is not None],
            stable_lens=[session.cached_rows for session in sessions],
            committed_lens=[session.committed_len for session in sessions],
            states=torch.stack(states),
            root_tokens=[session.tokens[-1] for session in sessions],
            depth=shapes[0].depth,
            topk=shapes[0].topk,
            max_nodes=[shape.max_nodes for shape in shapes],
            coupling=self._coupling(sessions),
            stage_states=self._stage_states(sessions),
        )
        return self._grower.grow(batch)

    def release(self, session: Session) -> None:
        if session.lease is not None:
            session.lease.release()
            session.lease = None
        session.last_state = None

    def pages(self) -> Pages:
        allocator = self._pool.allocator
        return Pages(allocator.num_pages, allocator.free_pages, allocator.held_pages)

    def _extended(self, chunks: Sequence[RowChunk]) -> bool:
        """If the recorded graph fits these chunks, extend by replaying it. Return True if the graph ran."""
        extension = self.rounds.extension if self.rounds is not None else None
        if extension is None or not extension.takes(chunks):
            return False
        extension.run(chunks[0])
        return True

    def _root_state(self, session: Session) -> torch.Tensor | None:
        """Return the state from which level 0 is computed, ``[hidden]``."""
        return session.last_state

    def _stage_states(self, sessions: Sequence[Session]) -> torch.Tensor | None:
        """Return `GrowBatch.stage_states`, which only models with more than two stages need."""
        return None

    def _coupling(self, sessions: Sequence[Session]) -> Coupling | None:
        if all(session.temperature <= 0 for session in sessions):
            return None
        device = self._device
        signed = [signed_seed(session.seed) for session in sessions]
        return Coupling(
            temperature=torch.tensor([session.temperature for session in sessions], dtype=torch.float32).to(
                device
            ),
            seeds=torch.tensor(signed, dtype=torch.int64).to(device),
            choices=torch.tensor([session.choice_index for session in sessions], dtype=torch.int32).to(
                device
            ),
        )


def longest_session(pool: KVPool, max_shape: DraftShape) -> int:
    """Return the largest session, in tokens, that fits into an empty pool together with the largest tree."""
    return max(2, pool.capacity_tokens - scratch_rows(max_shape.depth, max_shape.topk))
