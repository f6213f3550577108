"""Torch reference of round_plan. `kernels.round_plan` documents the op."""

from __future__ import annotations

import torch

from outrider.kernels.round_plan.types import RowPlan


def round_plan(
    committed_lens: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    max_nodes: torch.Tensor,
    page_table: torch.Tensor,
    rows: int,
    depth: int,
    topk: int,
    page_size: int,
    lead: int,
    behind: int,
) -> RowPlan:
    bs, columns = tokens.shape
    device = tokens.device
    busy = counts > 0
    count = counts.to(torch.int64)[:, None]
    last = torch.where(busy, committed_lens - 1 + lead - behind, 0).to(torch.int64)  # may be negative
    stable = last.clamp(min=0)
    column = torch.arange(rows, device=device)
    source = column - (rows - count)  # [bs, R], column of the fresh token; below 0 for padding
    index = last[:, None] - rows + column
    given = source >= 0
    fresh = given & (index >= 0)
    scratch = stable[:, None] + torch.arange((depth - 1) * topk, device=device)  # indices of levels' rows
    at_level = (last[:, None] - 1 + torch.arange(1, depth, device=device)).clamp(min=0)  # [bs, depth - 1]
    positions = [index.clamp(min=0).view(-1), at_level.T.repeat_interleave(topk, 1).reshape(-1)]
    lens = [(last - count[:, 0]).clamp(min=0), *(stable + level * topk * busy for level in range(depth))]
    return RowPlan(
        tokens=torch.where(given, tokens.gather(1, source.clamp(min=0)), 0).view(-1),
        features=(source.clamp(min=0) + torch.arange(bs, device=device)[:, None] * columns)
        .view(-1)
        .to(torch.int32),
        extend_slots=_slots(page_table, torch.where(fresh, index, -1), page_size).view(-1),
        level_slots=_slots(page_table, torch.where(busy[:, None], scratch, -1), page_size)
        .view(bs, depth - 1, topk)
        .transpose(0, 1)
        .reshape(depth - 1, bs * topk),
        positions=torch.cat(positions).to(torch.int32),
        lens=torch.stack(lens).to(torch.int32),
        root_tokens=torch.where(busy, tokens.gather(1, (count - 1).clamp(min=0))[:, 0], 0),
        max_nodes=torch.where(busy, max_nodes, 1),
    )


def _slots(page_table: torch.Tensor, index: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots ``[bs, n] int64`` of token indices. An index below 0 has the slot -1."""
    pages = page_table.to(torch.int64).gather(1, index.clamp(min=0) // page_size)
    return torch.where(index >= 0, pages * page_size + index % page_size, -1)
