"""add_norm: RMSNorm, and what comes before it in a decoder layer: an embedding, or the addition of partial sums to the residual."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.add_norm import reference
from outrider.kernels.stream import Stream

__all__ = ["add_sums", "embed_rows", "normalise", "rms_norm"]


def add_sums(
    parts: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Stream:
    """Return the residual stream after ``residual + sum of parts + bias``, prepared for the norm that reads it next.

    Few rows are spread over several programs each, and the norm's division is left to the reader (`Stream.sums`); rows for which
    `normed_at_once` holds are normed.

    Args:
        parts: ``[rows, width]``, or ``[splits, rows, width] fp32`` to be added in order.
        residual: ``[rows, width]``; rows may be strided.
        norm_weight: ``[width]``.
        eps: Of the norm.
        bias: ``[width]`` or None.
        out: ``[rows, width]``, where the sum goes; rows may be strided. Allocated if None.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    rows, width = residual.shape
    expect("parts", parts[0] if parts.dim() == 3 else parts, (rows, width))
    expect_contiguous("parts", parts)
    expect("norm_weight", norm_weight, (width,))
    if out is not None:
        expect("out", out, (rows, width), residual.dtype)
    if use_triton(residual):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.add_sums(parts, residual, norm_weight, eps, bias, out)
    return reference.add_sums(parts, residual, norm_weight, eps, bias, out)


def embed_rows(tokens: torch.Tensor, table: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> Stream:
    """Return the residual stream that starts with ``table[tokens]``.

    Args:
        tokens: ``[rows]``, int32 or int64.
        table: ``[vocabulary, width]``, contiguous.
        norm_weight, eps: Of the first layer's norm.
    """
    expect("tokens", tokens, (None,))
    expect("norm_weight", norm_weight, (table.shape[1],))
    expect_contiguous("table", table)
    if use_triton(table):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.embed_rows(tokens, table, norm_weight, eps)
    return reference.embed_rows(tokens, table, norm_weight, eps)


def normalise(stream: Stream) -> torch.Tensor:
    """Return the normed rows ``[rows, width]`` of a stream."""
    if stream.sums is None:
        return stream.scaled
    if use_triton(stream.scaled):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.normalise(stream)
    return reference.normalise(stream)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension of ``x [rows, width]`` (rows may be strided).

    Args:
        x: ``[rows, width]``.
        weight: ``[width]``.
        eps: Added to the mean square.
        out: ``[rows, width]``; rows may be strided. Allocated if None.
    """
    expect("weight", weight, (x.shape[1],))
    if out is not None:
        expect("out", out, tuple(x.shape), x.dtype)
    if use_triton(x):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.rms_norm(x, weight, eps, out)
    return reference.rms_norm(x, weight, eps, out)
