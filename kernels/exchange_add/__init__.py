"""exchange_add: adds the sum of all tensor-parallel ranks' parts to the residual stream, in one launch.

This op is meant for few rows. Every rank writes its part of the sum into inboxes in the memory of all ranks,
and polls its own inbox. An empty element of an inbox contains a reserved word. A rank therefore needs no
flags to see which numbers have arrived. Parts are added in rank order, so all ranks compute the same bits.

The scheme is the "Lamport" all-reduce of TensorRT-LLM. Reading an element also empties it, so two slots per
inbox are enough.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import ceil_div, expect, expect_contiguous
from outrider.kernels.exchange_add import reference
from outrider.kernels.exchange_add.types import ABSENT, BLOCK, Boxes, inbox_shape
from outrider.kernels.stream import FEW_ROWS, ResidualStream

__all__ = ["ABSENT", "BLOCK", "Boxes", "can_exchange", "exchange_add", "inbox_shape"]


def can_exchange(rows: int, width: int, boxes: Boxes) -> bool:
    """Return whether a rank's inboxes have room for this many rows of this width.

    Example:
        >>> import torch
        >>> from outrider.kernels.exchange_add import Boxes, can_exchange, inbox_shape
        >>> boxes = Boxes.of(0, [torch.empty(inbox_shape(1, 512), dtype=torch.int32)], patience=1)
        >>> [can_exchange(rows, 512, boxes) for rows in (64, 65)]
        [True, False]
    """
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
) -> ResidualStream:
    """Return the residual stream after ``residual + sum over ranks of parts + bias``, ready for the RMS norm.

    If a rank does not send its part in time, all rows become NaN and `Boxes.lost` becomes 1. Later calls do
    not wait for other ranks.

    Args:
        parts: This rank's part: ``[rows, width]`` in the residual's dtype, or ``[splits, rows, width] fp32``,
            whose splits are added first. The sum is exchanged in the dtype of `parts`.
        residual: ``[rows, width]``, the same on every rank; rows may be strided.
        norm_weight: ``[width]``.
        eps: Epsilon of the norm, added to the mean square.
        boxes: This rank's view of the inboxes, large enough for the rows (`can_exchange`).
        bias: The complete bias ``[width]``, the same on every rank, or None.
        out: ``[rows, width]`` that receives the sum; rows may be strided. Allocated if None.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong, or the rows do not fit into the boxes. The
            message names the cause.

    Example:
        Both ranks run in one process here. Normally, each rank runs in its own process. Rank 1 only sends its
        part.

        >>> import torch
        >>> from outrider.kernels.exchange_add import Boxes, exchange_add, inbox_shape
        >>> from outrider.kernels.exchange_add.reference import send
        >>> inboxes = [torch.empty(inbox_shape(2, 2), dtype=torch.int32) for _ in range(2)]
        >>> boxes = [Boxes.of(rank, inboxes, patience=100) for rank in range(2)]
        >>> send(torch.tensor([[10.0, 20.0]]), boxes[1])
        >>> residual = torch.tensor([[100.0, 200.0]])
        >>> stream = exchange_add(torch.tensor([[1.0, 2.0]]), residual, torch.ones(2), 1e-6, boxes[0])
        >>> stream.residual
        tensor([[111., 222.]])
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
        raise ValueError(f"boxes of {boxes.tiles} tiles cannot hold {rows} rows of width {width}")
    if use_triton(residual):
        from outrider.kernels.exchange_add import triton as compiled

        return compiled.exchange_add(parts, residual, norm_weight, eps, boxes, bias, out)
    return reference.exchange_add(parts, residual, norm_weight, eps, boxes, bias, out)
