"""tree_build: builds a tree from the best candidates of all levels (EAGLE-2's dynamic draft tree)."""

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
    """Build each sequence's draft tree: keep the best ``max_nodes - 1`` candidates below the root.

    Candidates are selected by (score descending, index ascending), and nodes are ordered by candidate index.
    The input must obey one rule: a child neither outranks nor precedes its parent. The selected candidates
    then form a tree. If the input violates the rule, a child can be selected without its parent. Such a child
    gets parent -1, and verification never accepts it.

    The method is the reranking phase of EAGLE-2 (arXiv 2406.16858, section 4.2).

    Args:
        scores: ``[bs, C] fp32``, cumulative scores of all candidates in level order. -inf or NaN marks a
            column without a candidate.
        tokens: ``[bs, C] int32``, target ids.
        parents: ``[bs, C] int32``, candidate index of the parent, -1 = the root.
        root_tokens: ``[bs] int32``, token of each root.
        max_nodes: ``[bs] int32``, largest number of nodes of each tree, the root included: 1..num_columns.
            Values above num_columns count as num_columns.
        num_columns: N, the width of the result.
        logprobs: ``[bs, C] fp32``, log-probs of all candidates, or None. If given, the result contains the
            log-probs of the nodes.

    Returns:
        The trees.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, or num_columns < 1. The message names the argument.

    Example:
        The root (token 5) has the candidates 11 and 12, and candidate 11 has the candidates 21 and 22. The
        best three candidates are kept.

        >>> import torch
        >>> from outrider.kernels.tree_build import tree_build
        >>> scores = torch.tensor([[-0.5, -1.0, -0.7, -2.0]])
        >>> tokens, parents = torch.tensor([[11, 12, 21, 22]]).int(), torch.tensor([[-1, -1, 0, 0]]).int()
        >>> tree = tree_build(scores, tokens, parents, torch.tensor([5]).int(), torch.tensor([4]).int(), 5)
        >>> tree.num_nodes.tolist(), tree.tokens.tolist()
        ([4], [[5, 11, 12, 21, 0]])
        >>> tree.parents.tolist(), tree.depths.tolist()
        ([[-1, 0, 0, 1, -1]], [[0, 1, 1, 2, 0]])
        >>> [f"{mask:05b}" for mask in tree.ancestors[0, :, 0].tolist()]
        ['00001', '00011', '00101', '01011', '00000']
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
        raise ValueError(f"num_columns is {num_columns}; it must be at least 1 (the root)")
    if use_triton(scores):
        from outrider.kernels.tree_build import triton as compiled

        return compiled.tree_build(scores, tokens, parents, root_tokens, max_nodes, num_columns, logprobs)
    return reference.tree_build(scores, tokens, parents, root_tokens, max_nodes, num_columns, logprobs)
