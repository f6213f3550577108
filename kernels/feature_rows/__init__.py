"""feature_rows: copies feature rows of accepted nodes to the feature plane and to the next round's input.

A feature row is the target's hidden state at one token, as the draft uses it. The feature plane is the part
of the KV cache that stores these rows in pages, like K and V.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.feature_rows import reference

__all__ = ["scatter_rows"]


def scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> None:
    """Copy each feature row to its KV slot in `plane`, and to its place in `out`.

    Args:
        rows: ``[M, width]``, or partial sums ``[splits, M, width] fp32``, whose total is written. The tensor
            is contiguous. A row is not read if its slot and its place are both -1.
        slots: ``[M] int64``, the KV slot of each feature row. Rows with slot -1 are not written to `plane`.
        plane: ``[pages, page_size, width]``, contiguous.
        places: ``[M] int64``, the row of `out` for each feature row. Rows with place -1 are not written to
            `out`.
        out: ``[..., width]``, contiguous. The op views this tensor as ``[rows, width]``.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.feature_rows import scatter_rows
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> plane, out = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)
        >>> scatter_rows(rows, torch.tensor([-1, 0]), plane, torch.tensor([-1, 1]), out)
        >>> plane
        tensor([[[3., 4.],
                 [0., 0.]]])
        >>> out
        tensor([[[0., 0.],
                 [3., 4.]]])
    """
    count, width = rows.shape[-2:]
    expect("rows", rows[0] if rows.dim() == 3 else rows, (count, width))
    expect_contiguous("rows", rows)
    expect("slots", slots, (count,), torch.int64)
    expect("plane", plane, (None, None, width))
    expect_contiguous("plane", plane)
    expect("places", places, (count,), torch.int64)
    expect("out", out, (*[None] * (out.dim() - 1), width))
    expect_contiguous("out", out)
    if use_triton(rows):
        from outrider.kernels.feature_rows import triton as compiled

        compiled.scatter_rows(rows, slots, plane, places, out)
    else:
        reference.scatter_rows(rows, slots, plane, places, out)
