"""exchange_add: the sum over the ranks of tensor parallelism of a product's parts, added to the residual: one launch, few rows.

Every rank writes its part into the memory of the others, and reads theirs from its own as it comes: the data are their own signal. The
parts are added in the order of the ranks, so that all ranks get the same bits.
Source of the scheme: "Lamport" all-reduce of TensorRT-LLM; the inboxes are emptied as they are read, so two of each suffice.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import ceil_div, expect, expect_contiguous
from outrider.kernels.exchange_add import reference
from outrider.kernels.exchange_add.types import ABSENT, BLOCK, Boxes, inbox_shape
from outrider.kernels.stream import FEW_ROWS, Stream

__all__ = ["ABSENT", "BLOCK", "Boxes", "can_exchange", "exchange_add", "inbox_shape"]


def can_exchange(rows: int, width: int, boxes: Boxes) -> bool:
    """Whether the boxes hold so many rows."""
    return rows <= FEW_ROWS and rows * ceil_div(width, BLOCK) <= boxes.tiles


def exchange_add(
    parts: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    boxes: Boxes,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Stream:
    """Return the residual stream after ``residual + sum over ranks of parts + bias``, prepared for the norm that reads it next.

    The rows are not numbers where a rank did not send its part in time, and `Boxes.lost` is 1 from then on: nobody waits again.

    Args:
        parts: This rank's, ``[rows, width]`` in the residual's dtype, or ``[splits, rows, width] fp32`` to be added before. They are
            exchanged in their dtype.
        residual: ``[rows, width]``, the same on every rank; rows may be strided.
        norm_weight: ``[width]``.
        eps: Of the norm.
        boxes: What `can_exchange` says yes to.
        bias: ``[width]``, whole on every rank, or None.
        out: ``[rows, width]``, where the sum goes; rows may be strided. Allocated if None.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    rows, width = residual.shape
    expect(
        "parts",
        parts[0] if parts.dim() == 3 else parts,
        (rows, width),
        torch.float32 if parts.dim() == 3 else residual.dtype,
    )
    expect_contiguous("parts", parts)
    expect("norm_weight", norm_weight, (width,))
    if out is not None:
        expect("out", out, (rows, width), residual.dtype)
    if not can_exchange(rows, width, boxes):
        raise ValueError(f"boxes of {boxes.tiles} tiles do not hold {rows} rows of {width}")
    if use_triton(residual):
        from outrider.kernels.exchange_add import triton as compiled

        return compiled.exchange_add(parts, residual, norm_weight, eps, boxes, bias, out)
    return reference.exchange_add(parts, residual, norm_weight, eps, boxes, bias, out)
