"""Defines `StoredAttention`: attention over K/V that is already in the pool, for the fused decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.kv.pool import KVPool


class StoredAttention(ABC):
    """An `AttentionBackend` that can attend without storing K/V."""

    # An abstract class rather than a Protocol: every pass calls isinstance, which is slow for Protocols.

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one forward pass (see `AttentionBackend.plan`)."""

    @property
    @abstractmethod
    def slots(self) -> torch.Tensor:
        """The slots of the planned step's rows, ``[rows] int64``."""

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
        """Attend as `AttentionBackend.run` does. The K and V of the step's rows must be stored already."""
