"""Attention through the project's own kernels: Triton on CUDA, their references elsewhere."""

from __future__ import annotations

import torch

from outrider.kernels.kv_store import kv_store
from outrider.kernels.tree_attention import tree_attention
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.kv.pool import KVPool


class KernelAttention:
    """`AttentionBackend` on `kernels.kv_store` and `kernels.tree_attention`. Never waits for the device."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None

    @property
    def batch(self) -> AttentionBatch | None:
        """See `AttentionBackend.batch`."""
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch; the kernels read its tensors."""
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
        """See `AttentionBackend.run`."""
        batch = self._batch
        assert batch is not None, "plan() comes before run()"
        k_plane = pool.k_planes[layer]
        v_plane = k_plane if pool.latent else pool.v_planes[layer]
        kv_store(k, v, k_plane, v_plane, batch.slots)  # of a latent, twice the same
        out = tree_attention(
            q,
            k_plane,
            v_plane,
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
