"""The seam of the fused decoder: attention to K/V that are in the pool already."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.kv.pool import KVPool


class StoredAttention(ABC):
    """An `AttentionBackend` whose storing and attending can be called apart. A class to inherit: it is asked for at every pass."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`."""

    @property
    @abstractmethod
    def slots(self) -> torch.Tensor:
        """Where the planned step's rows go, ``[rows] int64``."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        pool: KVPool,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attend as `AttentionBackend.run` does, after K and V of the step's rows were stored."""
