"""Attention through this project's own kernels: Triton on CUDA, their references elsewhere."""

from __future__ import annotations

import torch

from outrider.kernels.kv_store import kv_store
from outrider.kernels.tree_attention import tree_attention
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool


class KernelAttention(StoredAttention):
    """`AttentionBackend` on `kernels.kv_store` and `kernels.tree_attention`. Never waits for the device."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None

    @property
    def batch(self) -> AttentionBatch | None:
        """The batch planned last."""
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch. The kernels read its tensors."""
        self._batch = batch

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: KVPool,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Store K/V, then attend (see `AttentionBackend.run`)."""
        k_plane, v_plane = _planes(pool, layer)
        kv_store(k, v, k_plane, v_plane, self.slots)  # In a latent pool, both planes are the same.
        return self.attend(layer, q, pool, scale, window, sinks, softcap)

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the planned step's rows, ``[rows] int64``."""
        return self._planned.slots

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
        """Attend over K/V that is already in the pool."""
        batch = self._planned
        out = tree_attention(
            q,
            *_planes(pool, layer),
            batch.page_table,
            batch.prefix_lens,
            batch.kv_lens,
            batch.query_start,
            batch.ancestors,
            scale=scale,
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
            window=window,
            sinks=sinks,
            softcap=softcap,
        )
        return out.flatten(1)

    @property
    def _planned(self) -> AttentionBatch:
        assert self._batch is not None, "plan() comes before run()"
        return self._batch


def _planes(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the planes of K and V. In a latent pool, both planes are the same."""
    return pool.k_planes[layer], pool.k_planes[layer] if pool.latent else pool.v_planes[layer]
