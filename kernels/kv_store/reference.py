"""Torch reference of kv_store. `kernels.kv_store` documents the op."""

from __future__ import annotations

import torch

from outrider.kernels._fp8 import convert, movable


def kv_store(
    k: torch.Tensor, v: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, slots: torch.Tensor
) -> None:
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    for plane, rows in ((k_plane, k), (v_plane, v)):
        movable(plane).flatten(0, 1).index_copy_(0, slots, movable(convert(rows, plane.dtype)))
