"""feature_rows in plain torch; the contract is in the package's docstring."""

from __future__ import annotations

import torch


def place_rows(rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, out: torch.Tensor) -> None:
    """See `outrider.kernels.feature_rows.place_rows`."""
    whole = rows.sum(0) if rows.dim() == 3 else rows
    out.copy_(whole.view(out.shape))
    kept = slots >= 0
    plane.view(-1, plane.shape[2]).index_copy_(0, slots[kept], whole[kept].to(plane.dtype))
