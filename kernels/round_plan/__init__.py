"""round_plan: computes tokens, positions, slots and lengths of a drafting pass's rows on the device."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.round_plan import reference
from outrider.kernels.round_plan.types import RowPlan

__all__ = ["RowPlan", "round_plan"]


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
    behind: int = 0,
) -> RowPlan:
    """Lay out the rows of a drafting pass, given the results of the last round (see `RowPlan`).

    The host provides no values that change between rounds, so one CUDA graph serves all lengths.

    Args:
        committed_lens: ``[bs] int32``, number of committed tokens, the root included.
        counts: ``[bs] int32``, number of fresh tokens: 1..R, or 0 for an idle sequence. Fresh tokens are the
            tokens that the last round committed. Rows of idle sequences have no KV slots.
        tokens: ``[bs, columns] int32``, the fresh tokens, the root last. Columns from ``counts[b]`` on are
            ignored.
        max_nodes: ``[bs] int32``, largest number of nodes of each tree.
        page_table: ``[bs, max_pages] int32``, the pages of each sequence, with room for the rows of all tree
            levels.
        rows: R, the number of rows that extend each sequence before the tree levels, at most `columns`.
        depth: Depth of the trees, at least 1.
        topk: Width of each level of the trees, at least 1.
        page_size: Tokens per page.
        lead: 0 if a row pairs a token with the feature of the preceding token, 1 if a row represents a single
            token. If `behind` is 0, a sequence has ``committed_lens - 1 + lead`` stable rows (see
            `RowPlan`).
        behind: Number of stable rows that are missing at the end of each sequence. It is above 0 only for the
            later layers in a chain of MTP layers, which read tokens further ahead. Positions decrease by
            `behind`. Rows whose position would be below 0 have no KV slots.

    Returns:
        The plan.

    Raises:
        ValueError: A tensor's shape or dtype, or `rows`, `depth`, `topk` or `behind` is wrong. The message
            names the argument.

    Example:
        The sequence has 5 committed tokens, of which 2 are fresh, and uses pages 3 and 1. The two fresh rows
        are the last of the three rows. The two rows of level 1 follow the fresh rows.

        >>> import torch
        >>> from outrider.kernels.round_plan import round_plan
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> plan = round_plan(
        ...     ints(5), ints(2), ints([7, 8, 0]), ints(4), ints([3, 1]),
        ...     rows=3, depth=2, topk=2, page_size=4, lead=0,
        ... )
        >>> plan.tokens.tolist(), plan.root_tokens.tolist()
        ([0, 7, 8], [8])
        >>> plan.extend_slots.tolist(), plan.level_slots.tolist()
        ([-1, 14, 15], [[4, 5]])
        >>> plan.positions.tolist(), plan.lens.tolist()
        ([1, 2, 3, 4, 4], [[2], [4], [6]])
    """
    bs = tokens.shape[0]
    expect("tokens", tokens, (bs, None), torch.int32)
    expect("committed_lens", committed_lens, (bs,), torch.int32)
    expect("counts", counts, (bs,), torch.int32)
    expect("max_nodes", max_nodes, (bs,), torch.int32)
    expect("page_table", page_table, (bs, None), torch.int32)
    if depth < 1 or topk < 1:
        raise ValueError(f"depth is {depth} and topk is {topk}; both must be at least 1")
    if behind < 0:
        raise ValueError(f"behind is {behind}, expected at least 0")
    if not 1 <= rows <= tokens.shape[1]:
        raise ValueError(f"rows is {rows}, expected 1..{tokens.shape[1]} (the number of columns of tokens)")
    if use_triton(tokens):
        from outrider.kernels.round_plan import triton as compiled

        return compiled.round_plan(
            committed_lens, counts, tokens, max_nodes, page_table, rows, depth, topk, page_size, lead, behind
        )
    return reference.round_plan(
        committed_lens, counts, tokens, max_nodes, page_table, rows, depth, topk, page_size, lead, behind
    )
