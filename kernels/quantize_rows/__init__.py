"""quantize_rows: rows in FP8 with a scale each."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.quantize_rows import reference

__all__ = ["quantize_rows"]


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in e4m3 and the scales whose product with it comes nearest to x: each row's largest magnitude becomes the type's, 448.

    Args:
        x: ``[rows, width]`` fp32/bf16/fp16; rows may be strided.

    Returns:
        ``[rows, width]`` e4m3 and ``[rows] fp32``; a row of zeros has the scale 1.
    """
    expect("x", x, (None, None))
    if use_triton(x):
        from outrider.kernels.quantize_rows import triton as compiled

        return compiled.quantize_rows(x)
    return reference.quantize_rows(x)
