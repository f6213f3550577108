"""Torch reference of feature_rows. The package documents the contract."""

from __future__ import annotations

import torch


def place_rows(rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, out: torch.Tensor) -> None:
    whole = rows.sum(0) if rows.dim() == 3 else rows
    out.copy_(whole.view(out.shape))
    kept = slots >= 0
    plane.view(-1, plane.shape[2]).index_copy_(0, slots[kept], whole[kept].to(plane.dtype))


def scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> None:
    whole = rows.sum(0) if rows.dim() == 3 else rows
    for target, index in ((plane, slots), (out, places)):
        kept = index >= 0
        target.view(-1, whole.shape[1]).index_copy_(0, index[kept], whole[kept].to(target.dtype))
