"""silu_mul: gated activation of an MLP, computed from a fused gate-up product or its partial sums."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.silu_mul import reference
from outrider.kernels.stream import ResidualStream

__all__ = ["silu_mul"]


def silu_mul(
    parts: torch.Tensor,
    stream: ResidualStream | None = None,
    *,
    bias: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Return ``act(gate) * up`` of a gated MLP, with ``gate, up = (sum of parts / rms + bias).chunk(2)``.

    Args:
        parts: ``[rows, 2 * intermediate]``, gate first, or partial sums
            ``[splits, rows, 2 * intermediate] fp32``, which are added in order. Contiguous.
        stream: Residual stream that the product was computed from. Give it if the rows must still be divided
            by the stream's root mean square (rms). With None, the op does not divide.
        bias: ``[2 * intermediate]`` or None.
        gelu: True selects gelu (tanh form) instead of silu.

    Returns:
        ``[rows, intermediate]`` in the dtype of the stream's rows, or of `parts` if `stream` is None.

    Raises:
        ValueError: A tensor's shape or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.silu_mul import silu_mul
        >>> silu_mul(torch.tensor([[0.0, 1.0, 5.0, 3.0]]))  # silu(0) * 5, silu(1) * 3
        tensor([[0.0000, 2.1932]])
    """
    if parts.shape[-1] % 2:
        raise ValueError(f"parts has {parts.shape[-1]} columns; gate and up need an even number of columns")
    expect_contiguous("parts", parts)
    if bias is not None:
        expect("bias", bias, (parts.shape[-1],))
    dtype = parts.dtype if stream is None else stream.scaled.dtype
    if use_triton(parts):
        from outrider.kernels.silu_mul import triton as compiled

        return compiled.silu_mul(parts, stream, bias, gelu, dtype)
    return reference.silu_mul(parts, stream, bias, gelu, dtype)
