"""tree_build: of all candidates ever scored keep the best, as a tree (EAGLE-2's dynamic tree)."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.tree_build import reference
from outrider.kernels.tree_build.types import DraftTreeTensors

__all__ = ["DraftTreeTensors", "tree_build"]


def tree_build(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    root_tokens: torch.Tensor,
    max_nodes: torch.Tensor,
    num_columns: int,
    logprobs: torch.Tensor | None = None,
) -> DraftTreeTensors:
    """Keep each sequence's best ``max_nodes - 1`` candidates by (score descending, index ascending), order them by index, prepend the root.

    A child neither outranks its parent nor precedes it, so that the kept set is a tree. Where the caller breaks that rule, an orphan gets
    parent -1, which verification never accepts.

    Args:
        scores: ``[bs, C] fp32``, cumulative scores of every candidate ever scored, in level order; -inf or NaN = not a candidate.
        tokens: ``[bs, C] int32``, target ids.
        parents: ``[bs, C] int32``, candidate index of the parent, -1 = the root.
        root_tokens: ``[bs] int32``.
        max_nodes: ``[bs] int32``, nodes of each tree, the root included, 1..num_columns (a larger value counts as num_columns).
        num_columns: N, the width of the result.
        logprobs: ``[bs, C] fp32`` of every candidate, to be handed on with the nodes; or None.

    Returns:
        The trees.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, or num_columns < 1; the message names it.
    """
    bs, candidates = scores.shape
    expect("scores", scores, (bs, candidates), torch.float32)
    expect("tokens", tokens, (bs, candidates), torch.int32)
    expect("parents", parents, (bs, candidates), torch.int32)
    expect("root_tokens", root_tokens, (bs,), torch.int32)
    expect("max_nodes", max_nodes, (bs,), torch.int32)
    if logprobs is not None:
        expect("logprobs", logprobs, (bs, candidates), torch.float32)
    if num_columns < 1:
        raise ValueError(f"num_columns is {num_columns}, expected at least 1 (the root)")
    if use_triton(scores):
        from outrider.kernels.tree_build import triton as compiled

        return compiled.tree_build(scores, tokens, parents, root_tokens, max_nodes, num_columns, logprobs)
    return reference.tree_build(scores, tokens, parents, root_tokens, max_nodes, num_columns, logprobs)
