"""tree_check: validates trees written by another process, and replaces an invalid tree by its root alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous

__all__ = ["CheckedTrees", "tree_check"]


class CheckedTrees(NamedTuple):
    """Trees in the layout of `shared.spec.tree.DraftBatch`, without log-probs."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor
    ancestors: torch.Tensor


def tree_check(
    number: torch.Tensor,
    expected: torch.Tensor,
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    fresh: torch.Tensor,
    counts: torch.Tensor,
    *,
    vocab_size: int,
    depth: int,
) -> CheckedTrees:
    """Validate draft trees on the device, and compute their roots, depths and ancestor masks.

    The rows may contain arbitrary bytes. A row keeps its tree if it meets all conditions below. Otherwise, a
    tree with only the root replaces the row's tree.

    - ``number == expected``, and the row is not idle.
    - The number of nodes is within 1..N.
    - The token of every draft is in the vocabulary, and the parent of every draft precedes the draft.
    - No node is deeper than `depth`.

    Args:
        number: ``[1] int32``, number of the round that the trees were made for.
        expected: ``[1] int32``, number of this round.
        num_nodes: ``[bs] int32``, contiguous: number of nodes of each tree, the root included.
        tokens: ``[bs, N] int32``, contiguous; column 0 is ignored. Must not be written during the call.
        parents: Like `tokens`.
        fresh: ``[bs, R] int32``, contiguous, tokens chosen in the last round; the root is at column
            ``counts[b] - 1``.
        counts: ``[bs] int32``, contiguous, number of tokens in `fresh`; 0 for idle rows.
        vocab_size: Size of the vocabulary.
        depth: Largest depth of a node.

    Returns:
        The trees.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        Each tree has three nodes. In the second tree, the parent of node 1 does not precede node 1.

        >>> import torch
        >>> from outrider.kernels.tree_check import tree_check
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> tokens, parents = ints([0, 6, 7], [0, 6, 7]), ints([0, 0, 1], [0, 2, 0])
        >>> fresh, counts = ints([4, 5], [9, 0]), ints(2, 1)
        >>> trees = tree_check(
        ...     ints(8), ints(8), ints(3, 3), tokens, parents, fresh, counts, vocab_size=100, depth=2
        ... )
        >>> trees.num_nodes.tolist(), trees.tokens.tolist()
        ([3, 1], [[5, 6, 7], [9, 0, 0]])
        >>> trees.parents.tolist(), trees.depths.tolist()
        ([[-1, 0, 1], [-1, -1, -1]], [[0, 1, 2], [0, 0, 0]])
    """
    bs = counts.shape[0]
    expect("number", number, (1,), torch.int32)
    expect("expected", expected, (1,), torch.int32)
    expect("num_nodes", num_nodes, (bs,), torch.int32)
    expect("tokens", tokens, (bs, None), torch.int32)
    expect("parents", parents, (bs, tokens.shape[1]), torch.int32)
    expect("fresh", fresh, (bs, None), torch.int32)
    expect("counts", counts, (bs,), torch.int32)
    for name, tensor in (
        ("num_nodes", num_nodes),
        ("tokens", tokens),
        ("parents", parents),
        ("fresh", fresh),
        ("counts", counts),
    ):
        expect_contiguous(name, tensor)
    if use_triton(tokens):
        from outrider.kernels.tree_check import triton as compiled

        return CheckedTrees(
            *compiled.tree_check(
                number, expected, num_nodes, tokens, parents, fresh, counts, vocab_size, depth
            )
        )
    from outrider.kernels.tree_check import reference

    return CheckedTrees(
        *reference.tree_check(number, expected, num_nodes, tokens, parents, fresh, counts, vocab_size, depth)
    )
