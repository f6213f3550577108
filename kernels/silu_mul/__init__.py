"""silu_mul: the gated activation of an MLP, on a fused gate-up product or its partial sums."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.silu_mul import reference
from outrider.kernels.stream import Stream

__all__ = ["silu_mul"]


def silu_mul(
    parts: torch.Tensor,
    stream: Stream | None = None,
    *,
    bias: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Return ``act(gate) * up``, ``[rows, intermediate]``, for ``gate, up = (sum of parts / rms + bias).chunk(2)``.

    Args:
        parts: ``[rows, 2 * intermediate]``, or ``[splits, rows, 2 * intermediate] fp32`` to be added in order; gate first.
        stream: The rows of the product, whose division by the root mean square is still to be done; None: nothing is.
        bias: ``[2 * intermediate]`` or None.
        gelu: The activation is gelu (tanh form) instead of silu.

    Raises:
        ValueError: A tensor's shape or layout is wrong; the message names it.
    """
    if parts.shape[-1] % 2:
        raise ValueError(f"parts has {parts.shape[-1]} columns; gate and up need an even number")
    expect_contiguous("parts", parts)
    if bias is not None:
        expect("bias", bias, (parts.shape[-1],))
    dtype = parts.dtype if stream is None else stream.scaled.dtype
    if use_triton(parts):
        from outrider.kernels.silu_mul import triton as compiled

        return compiled.silu_mul(parts, stream, bias, gelu, dtype)
    return reference.silu_mul(parts, stream, bias, gelu, dtype)
