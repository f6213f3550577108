"""row_norm: batch-invariant RMSNorm, whose result for a row is bitwise the same in any batch."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.row_norm import reference

__all__ = ["row_norm"]


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in fp32.

    Args:
        x: ``[rows, size]``, or ``[rows, heads, size]`` with a weight for each head; fp32/bf16/fp16.
        weight: ``[size]`` or ``[heads, size]``.
        eps: Epsilon of the norm, added to the mean square.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: A tensor's shape is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.row_norm import row_norm
        >>> x, weight = torch.tensor([[2.0, -2.0], [0.3, 0.7]]), torch.tensor([1.0, 10.0])
        >>> row_norm(x, weight, 0.0)[0]
        tensor([  1., -10.])
        >>> torch.equal(row_norm(x[1:], weight, 0.0), row_norm(x, weight, 0.0)[1:])
        True
    """
    expect("weight", weight, tuple(x.shape[1:]))
    if use_triton(x):
        from outrider.kernels.row_norm import triton as compiled

        return compiled.row_norm(x, weight, eps)
    return reference.row_norm(x, weight, eps)
