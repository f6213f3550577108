"""rope_store: rotates (RoPE) the queries and keys of a fused q-k-v product, and stores keys and values."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.rope_store import reference
from outrider.kernels.rope_store.types import Lookup
from outrider.kernels.stream import ResidualStream

__all__ = ["Lookup", "rope_angles", "rope_store"]


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of RoPE's angles: ``positions * frequencies``.

    The cosines and sines are multiplied by `factor`. The first half of each row of sines is negated.

    Args:
        positions: ``[rows]`` of any integer type.
        frequencies: ``[dim] fp32``, radians per position; the second half repeats the first.
        factor: Factor on both results.
        dtype: Dtype of the results. Angles are computed in fp32.

    Returns:
        cos and sin, each ``[rows, 1, dim]``.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.rope_store import rope_angles
        >>> cos, sin = rope_angles(torch.tensor([0, 1]), torch.tensor([0.5, 0.5]), 1.0, torch.float32)
        >>> cos[:, 0]
        tensor([[1.0000, 1.0000],
                [0.8776, 0.8776]])
        >>> sin[1, 0]
        tensor([-0.4794,  0.4794])
    """
    expect("positions", positions, (None,))
    expect("frequencies", frequencies, (None,), torch.float32)
    if use_triton(frequencies):
        from outrider.kernels.rope_store import triton as compiled

        return compiled.rope_angles(positions, frequencies, factor, dtype)
    return reference.rope_angles(positions, frequencies, factor, dtype)


def rope_store(
    parts: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    slots: torch.Tensor,
    *,
    stream: ResidualStream | None = None,
    bias: torch.Tensor | None = None,
    head_norm: torch.Tensor | None = None,
    head_eps: float = 0.0,
    lookup: Lookup | None = None,
) -> torch.Tensor:
    """Apply RoPE to a q-k-v product, return the queries, and store keys and values at their KV slots.

    Only queries and keys are rotated.

    Args:
        parts: The product ``[rows, (heads + 2 * kv_heads) * dim]``, ordered q, k, v. It may also be fp32
            partial sums of this shape with a leading dimension for the splits. The op adds partial sums in
            order. Without query heads, the op only stores keys and values.
        cos: ``[rows, 1, dim]`` from `rope_angles`.
        sin: ``[rows, 1, dim]`` from `rope_angles`.
        k_plane: ``[pages, page_size, kv_heads, dim]``, contiguous; may be FP8.
        v_plane: Like `k_plane`.
        slots: ``[rows] int64``. Rows with slot -1 are not stored. Slots >= 0 must be distinct.
        stream: Residual stream that the product was computed from. Give it if the rows must still be divided
            by the stream's root mean square. With None, the op does not divide.
        bias: ``[(heads + 2 * kv_heads) * dim]`` or None.
        head_norm: ``[heads + kv_heads, dim]``, weights of an RMSNorm over each head of q and k before the
            rotation (Qwen3), or None.
        head_eps: Epsilon of the head norm.
        lookup: Table entries to add to each row after the bias, or None.

    Returns:
        ``[rows, heads, dim]`` in the dtype of `cos`.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        One row with one head is rotated by a quarter turn. The query (1, 0) becomes (0, 1). The key (0, 1)
        becomes (-1, 0). The value (5, 6) is stored as it is.

        >>> import torch
        >>> from outrider.kernels.rope_store import rope_store
        >>> parts = torch.tensor([[1.0, 0.0, 0.0, 1.0, 5.0, 6.0]])
        >>> cos, sin = torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]])
        >>> k_plane, v_plane = torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2)
        >>> rope_store(parts, cos, sin, k_plane, v_plane, torch.tensor([1]))
        tensor([[[0., 1.]]])
        >>> k_plane[0, 1], v_plane[0, 1]
        (tensor([[-1.,  0.]]), tensor([[5., 6.]]))
    """
    kv_heads, dim = k_plane.shape[2:]
    rows = parts.shape[-2]
    heads = parts.shape[-1] // dim - 2 * kv_heads
    if heads < 0 or parts.shape[-1] % dim:
        raise ValueError(
            f"parts has {parts.shape[-1]} columns; "
            f"planes of {kv_heads} heads of {dim} need (heads + {2 * kv_heads}) * {dim}"
        )
    expect_contiguous("parts", parts)
    expect("cos", cos, (rows, 1, dim))
    expect("sin", sin, (rows, 1, dim))
    expect("v_plane", v_plane, tuple(k_plane.shape), k_plane.dtype)
    expect("slots", slots, (rows,), torch.int64)
    expect_contiguous("k_plane", k_plane)
    expect_contiguous("v_plane", v_plane)
    if head_norm is not None:
        expect("head_norm", head_norm, (heads + kv_heads, dim))
    if lookup is not None:
        lookup.check(rows, parts.shape[-1])
    version = reference.rope_store
    if use_triton(parts):
        from outrider.kernels.rope_store import triton as compiled

        version = compiled.rope_store
    return version(parts, cos, sin, k_plane, v_plane, slots, stream, bias, head_norm, head_eps, lookup)
