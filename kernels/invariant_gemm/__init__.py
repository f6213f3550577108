"""invariant_gemm: a linear layer in which the bits of a row depend on that row alone, not on how many rows there are or where it stands."""

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
    """Return ``x @ weight.T + bias + residual``, summed in fp32 in an order that the weight's shape and dtype decide.

    Args:
        x: ``[rows, in]`` fp32/bf16/fp16.
        weight: ``[out, in]``, x's dtype, contiguous.
        bias: ``[out]``, x's dtype, or None.
        residual: ``[rows, out]``, x's dtype, or None.

    Returns:
        ``[rows, out]`` in x's dtype.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
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
