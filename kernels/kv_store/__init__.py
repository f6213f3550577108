"""kv_store: write the K and V rows of this step's tokens into the paged planes."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.kv_store import reference

__all__ = ["kv_store"]


def kv_store(
    k: torch.Tensor, v: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store ``k[r], v[r]`` at slot ``slots[r]`` of the planes, in place.

    Args:
        k, v: ``[rows, kv_heads, dim]`` fp32/bf16/fp16; any strides with a dense last dimension (views of a fused QKV output).
        k_plane, v_plane: ``[pages, page_size, kv_heads, dim]``, contiguous; rows are converted to their dtype, to e4m3 by saturation.
        slots: ``[rows] int64``; slot = page * page_size + offset, -1 = do not store this row. Slots >= 0 must be distinct.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    rows, kv_heads, dim = k.shape
    expect("k_plane", k_plane, (None, None, kv_heads, dim))
    expect("v_plane", v_plane, tuple(k_plane.shape))
    expect("v", v, (rows, kv_heads, dim))
    expect("slots", slots, (rows,), torch.int64)
    expect_contiguous("k_plane", k_plane)
    expect_contiguous("v_plane", v_plane)
    if use_triton(k):
        from outrider.kernels.kv_store import triton as compiled

        compiled.kv_store(k, v, k_plane, v_plane, slots)
    else:
        reference.kv_store(k, v, k_plane, v_plane, slots)
