"""row_norm: RMSNorm in which the bits of a row depend on that row alone."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.row_norm import reference

__all__ = ["row_norm"]


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in fp32.

    Args:
        x: ``[rows, size]``, or ``[rows, heads, size]`` with a weight for each head; fp32/bf16/fp16.
        weight: ``[size]`` or ``[heads, size]``.
        eps: Added to the mean square.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: A tensor's shape is wrong; the message names it.
    """
    expect("weight", weight, tuple(x.shape[1:]))
    if use_triton(x):
        from outrider.kernels.row_norm import triton as compiled

        return compiled.row_norm(x, weight, eps)
    return reference.row_norm(x, weight, eps)
