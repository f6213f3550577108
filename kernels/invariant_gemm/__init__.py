"""invariant_gemm: a batch-invariant linear layer, whose result for a row is bitwise the same in any batch.

The result does not depend on the other rows, their number, or the row's position in the batch.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.invariant_gemm import reference

__all__ = ["invariant_gemm"]


def invariant_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias + residual``, summed in fp32.

    The order of the summation depends only on the weight's shape and dtype.

    Args:
        x: ``[rows, in]`` fp32/bf16/fp16.
        weight: ``[out, in]``, x's dtype, contiguous.
        bias: ``[out]``, x's dtype, or None.
        residual: ``[rows, out]``, x's dtype, or None.

    Returns:
        ``[rows, out]`` in x's dtype.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.invariant_gemm import invariant_gemm
        >>> x = torch.tensor([[1.0, 2.0], [0.1, 0.2]])
        >>> weight = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.3, 0.7]])
        >>> invariant_gemm(x, weight)
        tensor([[1.0000, 3.0000, 1.7000],
                [0.1000, 0.3000, 0.1700]])
        >>> torch.equal(invariant_gemm(x[1:], weight), invariant_gemm(x, weight)[1:])
        True
    """
    rows, width = x.shape
    out = weight.shape[0]
    expect("weight", weight, (None, width), x.dtype)
    if bias is not None:
        expect("bias", bias, (out,), x.dtype)
    if residual is not None:
        expect("residual", residual, (rows, out), x.dtype)
    version = reference.invariant_gemm
    if use_triton(x):
        from outrider.kernels.invariant_gemm import triton as compiled

        version = compiled.invariant_gemm
    return version(x, weight, bias, residual)
