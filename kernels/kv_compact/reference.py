"""Torch reference of kv_compact. `kernels.kv_compact` documents the op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels._fp8 import movable


def kv_compact(
    planes: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    cached_lens: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    table_rows: torch.Tensor | None,
) -> None:
    page_size, bs = planes[0].shape[1], path.shape[0]
    if table_rows is not None:
        num_accepted = torch.where(table_rows[:bs] >= 0, num_accepted, -1)
        page_table = page_table[table_rows[:bs].long().clamp(min=0)]
    steps = torch.arange(path.shape[1], dtype=torch.int32, device=path.device)
    # [bs, N]; rows whose source is their destination are not moved.
    moves = (steps <= num_accepted[:, None]) & (path >= 0) & (path != steps)
    rows, columns = moves.nonzero(as_tuple=True)
    if rows.numel() == 0:
        return
    base = cached_lens[rows].long()
    source = _slots(page_table, rows, base + path[rows, columns], page_size)
    target = _slots(page_table, rows, base + columns, page_size)
    for plane in planes:
        flat = movable(plane).flatten(0, 1)
        flat.index_copy_(0, target, flat.index_select(0, source))


def _slots(page_table: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots ``[n] int64`` of token indices ``[n]``; entry i belongs to sequence ``rows[i]``."""
    return page_table[rows, index // page_size].long() * page_size + index % page_size
