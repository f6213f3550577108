"""round_plan: tokens, positions, slots and lengths of every row of a drafting round, from what the last round left on the device."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.round_plan import reference
from outrider.kernels.round_plan.types import RoundPlan

__all__ = ["RoundPlan", "round_plan"]


def round_plan(
    committed_lens: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    max_nodes: torch.Tensor,
    page_table: torch.Tensor,
    *,
    rows: int,
    depth: int,
    topk: int,
    page_size: int,
    lead: int,
) -> RoundPlan:
    """Lay out the rows of a round. Nothing is asked of the host, so that one CUDA graph serves all lengths.

    Args:
        committed_lens: ``[bs] int32``, committed tokens, the root included.
        counts: ``[bs] int32``, how many of them are fresh: 0 (an idle sequence: it touches no memory) or 1..R.
        tokens: ``[bs, columns] int32``, the fresh tokens, the root last; columns from ``counts[b]`` on are ignored.
        max_nodes: ``[bs] int32``, of each tree.
        page_table: ``[bs, max_pages] int32``, holding every row up to the last level's.
        rows: R, the rows that extend a sequence, at most `columns`.
        depth, topk: Of the trees.
        page_size: Tokens of a page.
        lead: Stable rows less ``committed_lens - 1``: 0 where a row pairs a token with the feature before it, 1 where rows are tokens.

    Returns:
        The plan.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
    """
    bs = tokens.shape[0]
    expect("tokens", tokens, (bs, None), torch.int32)
    expect("committed_lens", committed_lens, (bs,), torch.int32)
    expect("counts", counts, (bs,), torch.int32)
    expect("max_nodes", max_nodes, (bs,), torch.int32)
    expect("page_table", page_table, (bs, None), torch.int32)
    if depth < 1 or topk < 1:
        raise ValueError(f"depth is {depth} and topk {topk}, expected at least 1")
    if not 1 <= rows <= tokens.shape[1]:
        raise ValueError(f"rows is {rows}, expected 1..{tokens.shape[1]} (the columns of tokens)")
    if use_triton(tokens):
        from outrider.kernels.round_plan import triton as compiled

        return compiled.round_plan(
            committed_lens, counts, tokens, max_nodes, page_table, rows, depth, topk, page_size, lead
        )
    return reference.round_plan(
        committed_lens, counts, tokens, max_nodes, page_table, rows, depth, topk, page_size, lead
    )
