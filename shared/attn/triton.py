"""Attention by this project's own kernels: Triton kernels on CUDA, and their torch references elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from outrider.kernels.kv_store import kv_store
from outrider.kernels.tree_attention import WorkList, plan_attention, tree_attention
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.chunks import ChunkAttention
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.obs.logging import get_logger

_log = get_logger("outrider.attention")


@dataclass(frozen=True, slots=True)
class _Heads:
    """The inputs of a work list, other than the batch. Layers with equal values share a work list."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    plane_dtype: torch.dtype


class KernelAttention(StoredAttention):
    """Attention backend that runs the Triton kernels `kernels.kv_store` and `kernels.tree_attention`.

    The backend never waits for the device.

    Attributes:
        chunks: Computes the attention of long prompt chunks with a library, where the library is faster than
            `tree_attention` (see `shared/attn/library.py`). None if no library is used.
    """

    def __init__(self) -> None:
        self.chunks: ChunkAttention | None = None
        self._batch: AttentionBatch | None = None
        self._works: dict[_Heads, WorkList] = {}
        self._parts: dict[tuple[int, int], AttentionBatch] = {}  # parts of the batch, by (first, last)

    @property
    def batch(self) -> AttentionBatch | None:
        """The batch planned last."""
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one forward pass: keep a reference to the batch, whose tensors the kernels read.

        For a ragged batch (`AttentionBatch.ragged`), the kernels' work depends on the number of heads. This
        work is therefore planned later, in the first layer.
        """
        self._batch = batch
        self._works = {}
        self._parts.clear()

    def use_library(self, chunks: ChunkAttention | None) -> None:
        """Use a library for long prompt chunks from now on. With None, use no library from now on."""
        self.chunks = chunks

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
        """Attend over K/V that is already in the pool (see `StoredAttention.attend`)."""
        batch = self._planned
        planes = _planes(pool, layer)
        out = None
        if not (self.chunks is None or pool.latent or window or softcap) and sinks is None:
            out = self._attend_chunks(self.chunks, q, planes, scale)
        if out is None:
            out = tree_attention(
                q,
                *planes,
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
                table_rows=batch.table_rows,
                work=self._work(batch, q, planes[0]) if batch.ragged else None,
            )
        return out.flatten(1)

    def _work(self, batch: AttentionBatch, q: torch.Tensor, plane: torch.Tensor) -> WorkList:
        """Return the work list of the planned step for layers with these heads and any window."""
        rows, count, dim = q.shape
        heads = _Heads(count, plane.shape[2], dim, q.dtype, plane.dtype)
        if heads not in self._works:
            self._works[heads] = plan_attention(
                batch.kv_lens,
                batch.query_start,
                batch.prefix_lens,
                batch.table_rows,
                rows=rows,
                max_query_len=batch.max_query_len,
                heads=heads.heads,
                kv_heads=heads.kv_heads,
                dim=dim,
                dtype=heads.dtype,
                plane_dtype=heads.plane_dtype,
            )
        return self._works[heads]

    def _attend_chunks(
        self, chunks: ChunkAttention, q: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> torch.Tensor | None:
        """Attend by the library's tiles. Return None if `tree_attention` has to attend from all rows."""
        others = partial(self._attend_sequences, q, planes, scale)
        try:
            return chunks.attend(self._planned, q, *planes, scale, others)
        except RuntimeError:  # For example, memory is short or a plan fails.
            _log.exception("prompts use this project's attention kernel from now on: the library failed")
            self.chunks = None
            return None

    def _attend_sequences(
        self,
        q: torch.Tensor,
        planes: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        first: int,
        last: int,
        out: torch.Tensor,
    ) -> None:
        """Attend from the rows of sequences ``[first, last)`` of a causal batch and write them to `out`."""
        some = self._parts.get((first, last))
        if some is None:
            some = self._parts[first, last] = _sequences(self._planned, first, last)
        tree_attention(
            q,
            *planes,
            some.page_table,
            some.prefix_lens,
            some.kv_lens,
            some.query_start,
            None,
            scale=scale,
            max_query_len=some.max_query_len,
            max_kv_len=some.max_kv_len,
            out=out,
        )

    @property
    def _planned(self) -> AttentionBatch:
        assert self._batch is not None, "plan() comes before run()"
        return self._batch


def _planes(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the planes of K and V. In a latent pool, both planes are the same."""
    return pool.k_planes[layer], pool.k_planes[layer] if pool.latent else pool.v_planes[layer]


def _sequences(batch: AttentionBatch, first: int, last: int) -> AttentionBatch:
    """Return the batch of sequences ``[first, last)``, with copied tensors.

    Row indices in the returned batch still count from the first row of `batch`. The tensors are copied
    because copies are aligned. For a tensor at an unaligned address, Triton would compile another kernel.
    """
    assert batch.host_lens is not None
    lens = batch.host_lens[first:last]
    return AttentionBatch(
        page_table=batch.page_table[first:last].clone(),
        prefix_lens=batch.prefix_lens[first:last].clone(),
        kv_lens=batch.kv_lens[first:last].clone(),
        query_start=batch.query_start[first : last + 1].clone(),
        ancestors=None,
        slots=batch.slots,
        max_query_len=max(count for _, count in lens),
        max_kv_len=max(start + count for start, count in lens),
        host_lens=lens,
    )
