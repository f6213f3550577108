"""feature_rows: what a projector made of the accepted nodes goes to its two places, the stored plane and the next round's input."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.feature_rows import reference

__all__ = ["place_rows"]


def place_rows(rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, out: torch.Tensor) -> None:
    """Write every row to `out`, and to its slot of the plane, in place.

    Args:
        rows: ``[bs * n, width]``, or ``[splits, bs * n, width] fp32`` whose sum they are; contiguous.
        slots: ``[bs * n] int64``; -1 leaves the plane alone.
        plane: ``[pages, page_size, width]``, contiguous.
        out: ``[bs, n, width]``, the last dimension dense.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    bs, count, width = out.shape
    expect("rows", rows[0] if rows.dim() == 3 else rows, (bs * count, width))
    expect_contiguous("rows", rows)
    expect("slots", slots, (bs * count,), torch.int64)
    expect("plane", plane, (None, None, width))
    expect_contiguous("plane", plane)
    if out.stride(2) != 1:
        raise ValueError(f"out must be dense in its last dimension, its strides are {out.stride()}")
    if use_triton(rows):
        from outrider.kernels.feature_rows import triton as compiled

        compiled.place_rows(rows, slots, plane, out)
    else:
        reference.place_rows(rows, slots, plane, out)
