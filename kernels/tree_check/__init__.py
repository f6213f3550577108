"""tree_check: trees that another process wrote are believed only as far as they are trees; all else is a round without drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous

__all__ = ["CheckedTrees", "tree_check"]


class CheckedTrees(NamedTuple):
    """Trees as `shared.spec.tree.DraftBatch` describes them, without log-probs."""

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
    """Check trees on the device, and derive what is not sent: roots, depths and masks.

    A row keeps its tree if ``number == expected``, the row is live, its size is within 1..N, every draft's token is in the vocabulary and
    its parent before it, and no node is deeper than `depth`. Any other row, whatever its bytes, becomes a tree of its root alone.

    Args:
        number: ``[1] int32``, of the round that the trees say they are for.
        expected: ``[1] int32``, of this round.
        num_nodes: ``[bs] int32``, the root included.
        tokens, parents: ``[bs, N] int32``, contiguous; column 0 is ignored. Nobody else may write to them meanwhile.
        fresh: ``[bs, R] int32``, contiguous, what the last round chose; the root is the last of ``counts[b]``.
        counts: ``[bs] int32``, 0 = idle.
        vocab_size: Token ids are below.
        depth: Of the deepest node.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
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
