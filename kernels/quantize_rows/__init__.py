"""quantize_rows: converts rows to FP8 with one scale per row."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.quantize_rows import reference

__all__ = ["quantize_rows"]


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of x to e4m3 (8-bit floats), with one scale per row.

    Each returned row times its scale approximates the corresponding row of x. The scale is chosen so that
    the row's largest magnitude becomes 448, the largest e4m3 number.

    Args:
        x: ``[rows, width]`` fp32/bf16/fp16; rows may be strided.

    Returns:
        ``[rows, width]`` e4m3 and ``[rows] fp32``. A row of zeros has the scale 1.

    Raises:
        ValueError: x does not have two dimensions.

    Example:
        >>> import torch
        >>> from outrider.kernels.quantize_rows import quantize_rows
        >>> rows, scales = quantize_rows(torch.tensor([[896.0, -448.0], [0.0, 0.0]]))
        >>> rows.float()
        tensor([[ 448., -224.],
                [   0.,    0.]])
        >>> scales
        tensor([2., 1.])
    """
    expect("x", x, (None, None))
    if use_triton(x):
        from outrider.kernels.quantize_rows import triton as compiled

        return compiled.quantize_rows(x)
    return reference.quantize_rows(x)
