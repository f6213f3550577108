"""kv_store: writes the K and V rows of this step's tokens to the paged planes."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.kv_store import reference

__all__ = ["kv_store"]


def kv_store(
    k: torch.Tensor, v: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store row r of K and V at KV slot ``slots[r]`` of the cache's planes, in place.

    Args:
        k: ``[rows, kv_heads, dim]`` fp32/bf16/fp16; any strides with a dense last dimension, such as a view
            of a fused QKV output.
        v: Like `k`.
        k_plane: ``[pages, page_size, kv_heads, dim]``, contiguous. Rows are converted to its dtype;
            conversion to e4m3 saturates.
        v_plane: Like `k_plane`.
        slots: ``[rows] int64``. A slot is ``page * page_size + offset``. Rows with slot -1 are not stored.
            Slots >= 0 must be distinct.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.kv_store import kv_store
        >>> k_plane, v_plane = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2)  # two pages of two tokens
        >>> k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> kv_store(k, 10 * k, k_plane, v_plane, torch.tensor([3, -1]))  # the second row is not stored
        >>> k_plane.view(4, 2)
        tensor([[0., 0.],
                [0., 0.],
                [0., 0.],
                [1., 2.]])
        >>> v_plane.view(4, 2)[3]
        tensor([10., 20.])
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
