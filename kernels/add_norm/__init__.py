"""add_norm: RMSNorm, fused with the preceding step of a decoder layer (embedding or addition)."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.add_norm import reference
from outrider.kernels.stream import ResidualStream

__all__ = ["add_sums", "embed_rows", "normalise", "rms_norm"]


def add_sums(
    parts: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> ResidualStream:
    """Return the residual stream after ``residual + sum of parts + bias``, prepared for the next RMS norm.

    If `normed_on_write` is True for these rows, this op also divides each row by its root mean square.
    Otherwise, the kernel that reads the stream divides, using the sums of squares in `ResidualStream.sums`.

    Args:
        parts: ``[rows, width]``, or partial sums ``[splits, rows, width] fp32``, which are added in order.
        residual: ``[rows, width]``; rows may be strided.
        norm_weight: ``[width]``.
        eps: Epsilon of the norm, added to the mean square.
        bias: ``[width]`` or None.
        out: ``[rows, width]`` that receives the sum; rows may be strided. Allocated if None.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import add_sums, normalise
        >>> residual = torch.tensor([[1.0, 0.0]])
        >>> parts = torch.tensor([[[1.0, 1.0]], [[0.0, 1.0]]])  # one row in two splits
        >>> stream = add_sums(parts, residual, torch.ones(2), 0.0)
        >>> stream.residual
        tensor([[2., 2.]])
        >>> normalise(stream)  # the root mean square of the row is 2
        tensor([[1., 1.]])
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


def embed_rows(
    tokens: torch.Tensor, table: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> ResidualStream:
    """Return a new residual stream, whose rows are the embeddings ``table[tokens]``.

    Args:
        tokens: ``[rows]``, int32 or int64.
        table: ``[vocabulary, width]``, contiguous.
        norm_weight: ``[width]``, weight of the first layer's norm.
        eps: Epsilon of the first layer's norm, added to the mean square.

    Raises:
        ValueError: A tensor's shape or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import embed_rows, normalise
        >>> table = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
        >>> stream = embed_rows(torch.tensor([2, 0]), table, torch.tensor([1.0, 3.0]), 0.0)
        >>> stream.residual
        tensor([[4., 4.],
                [1., 1.]])
        >>> normalise(stream)
        tensor([[1., 3.],
                [1., 3.]])
    """
    expect("tokens", tokens, (None,))
    expect("norm_weight", norm_weight, (table.shape[1],))
    expect_contiguous("table", table)
    if use_triton(table):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.embed_rows(tokens, table, norm_weight, eps)
    return reference.embed_rows(tokens, table, norm_weight, eps)


def normalise(stream: ResidualStream) -> torch.Tensor:
    """Return the normed rows ``[rows, width]`` of a residual stream.

    If the rows have not been divided by their root mean square yet, this op divides them.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import normalise
        >>> from outrider.kernels.stream import ResidualStream
        >>> row = torch.tensor([[4.0, 4.0]])
        >>> sums = torch.tensor([[16.0], [16.0]])  # sums of squares, in two parts
        >>> scaled = row * torch.tensor([1.0, 2.0])
        >>> normalise(ResidualStream(residual=row, scaled=scaled, sums=sums, eps=0.0))
        tensor([[1., 2.]])
    """
    if stream.sums is None:
        return stream.scaled
    if use_triton(stream.scaled):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.normalise(stream)
    return reference.normalise(stream)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the RMS norm ``x / sqrt(mean(x²) + eps) * weight``, computed over the last dimension.

    Args:
        x: ``[rows, width]``; rows may be strided.
        weight: ``[width]``.
        eps: Epsilon of the norm, added to the mean square.
        out: ``[rows, width]`` in x's dtype; rows may be strided. Allocated if None.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import rms_norm
        >>> rms_norm(torch.tensor([[2.0, -2.0], [4.0, 4.0]]), torch.tensor([1.0, 10.0]), 0.0)
        tensor([[  1., -10.],
                [  1.,  10.]])
    """
    expect("weight", weight, (x.shape[1],))
    if out is not None:
        expect("out", out, tuple(x.shape), x.dtype)
    if use_triton(x):
        from outrider.kernels.add_norm import triton as compiled

        return compiled.rms_norm(x, weight, eps, out)
    return reference.rms_norm(x, weight, eps, out)
