"""Torch reference of feature_rows. `kernels.feature_rows` documents the op."""

from __future__ import annotations

import torch


def scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> None:
    whole = rows.sum(0) if rows.dim() == 3 else rows
    for target, index in ((plane, slots), (out, places)):
        kept = index >= 0
        target.view(-1, whole.shape[1]).index_copy_(0, index[kept], whole[kept].to(target.dtype))
