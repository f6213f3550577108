"""rope_store: from a fused q-k-v product to rotated queries, and keys and values in the paged planes."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.rope_store import reference
from outrider.kernels.rope_store.types import Lookup
from outrider.kernels.stream import Stream

__all__ = ["Lookup", "rope_angles", "rope_store"]


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of ``positions * frequencies``, times `factor`; the first half of sin is negated.

    Args:
        positions: ``[rows]``, any integer type.
        frequencies: ``[dim] fp32``, radians per position; the second half repeats the first.
        factor: On both results.
        dtype: Of the results; angles are computed in fp32.

    Returns:
        cos and sin, ``[rows, 1, dim]``.
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
    stream: Stream | None = None,
    bias: torch.Tensor | None = None,
    head_norm: torch.Tensor | None = None,
    head_eps: float = 0.0,
    lookup: Lookup | None = None,
) -> torch.Tensor:
    """Return the rotated queries of a q-k-v product, and store its rotated keys and its values at their slots.

    Args:
        parts: ``[rows, (heads + 2 * kv_heads) * dim]``, or ``[splits, rows, same] fp32`` to be added in order; rows q, k, v. Without any
            heads of queries, keys and values are stored, and that is all.
        cos, sin: ``[rows, 1, dim]`` of `rope_angles`.
        k_plane, v_plane: ``[pages, page_size, kv_heads, dim]``, contiguous.
        slots: ``[rows] int64``; -1: do not store this row. Slots >= 0 must be distinct.
        stream: The rows of the product, whose division by the root mean square is still to be done; None: nothing is.
        bias: ``[(heads + 2 * kv_heads) * dim]`` or None.
        head_norm: ``[heads + kv_heads, dim]``, weights of an RMSNorm over each head of q and k before the rotation (Qwen3), or None.
        head_eps: Of that norm.
        lookup: What else is added to each row, behind the bias, or None.

    Returns:
        ``[rows, heads, dim]`` in the dtype of `cos`; the planes may be FP8.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    kv_heads, dim = k_plane.shape[2:]
    rows = parts.shape[-2]
    heads = parts.shape[-1] // dim - 2 * kv_heads
    if heads < 0 or parts.shape[-1] % dim:
        raise ValueError(
            f"parts has {parts.shape[-1]} columns; planes of {kv_heads} heads of {dim} need (heads + {2 * kv_heads}) * {dim}"
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
