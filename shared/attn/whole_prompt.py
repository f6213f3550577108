"""Attention of a pass over one whole prompt by a library. All shapes are fixed, for use in CUDA graphs."""

from __future__ import annotations

import torch

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.chunks import Attend
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.kv.pool import KVPool


class WholePromptAttention(KernelAttention):
    """Attention backend for a batch with one whole prompt, followed by padding rows.

    A library, such as cuDNN, computes causal attention of all rows over all rows, including padding. No row
    of the prompt sees the padding, because the padding comes last. Layers with a sliding window, attention
    sinks or a softcap use this project's kernel instead.

    Args:
        attend: The library's attention.
        pages: ``[ceil(rows / page_size)] int32``, the prompt's pages. The entries after the prompt's last
            page may be any page numbers.
        length: ``[1] int32``, number of tokens of the prompt.
    """

    def __init__(self, attend: Attend, pages: torch.Tensor, length: torch.Tensor) -> None:
        super().__init__()
        self._attend = attend
        self._pages = pages
        self._length = length

    def plan(self, batch: AttentionBatch) -> None:
        """Find the padding rows, whose slots may contain NaN left by other sequences and must not be read."""
        super().plan(batch)
        rows = batch.slots.shape[0]
        self._padding = (torch.arange(rows, device=batch.slots.device) >= self._length)[:, None, None]

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
        if pool.latent or window or softcap or sinks is not None:
            return super().attend(layer, q, pool, scale, window, sinks, softcap)
        k, v = (
            plane.index_select(0, self._pages).flatten(0, 1)[: q.shape[0]].masked_fill_(self._padding, 0.0)
            for plane in (pool.k_planes[layer], pool.v_planes[layer])
        )
        out, _ = self._attend(q.contiguous(), k, v, True, scale)
        return out.flatten(1)
