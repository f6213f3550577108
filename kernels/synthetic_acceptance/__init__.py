"""synthetic_acceptance: rewrites chosen tokens so that a random number of a tree's drafts is accepted.

This op is for measurements with random weights, where drafts are never correct by themselves. Serving never
uses the op.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.synthetic_acceptance import reference

__all__ = ["NOISE_CHOICE", "packed_acceptance", "synthetic_acceptance"]

NOISE_CHOICE = reference.NOISE_CHOICE


def synthetic_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    ancestors: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Rewrite chosen tokens so that `verify_tree` accepts exactly k drafts of each row.

    - k is the number of `thresholds` above the row's noise, but at most the depth of the deepest node. The
      noise is ``gumbel_noise(seed, position, NOISE_CHOICE, 0)``.
    - The path ends at the first node (in index order) of depth k.
    - At every earlier node of the path, the token of the path's next node replaces the chosen token.
    - At the path's last node, the chosen token stays unless a child has it. If a child has it, the next
      higher token (modulo the vocabulary) that no child has replaces the chosen token.
    - At nodes outside the path, the chosen tokens stay.

    Args:
        tokens: ``[bs, N] int32``, trees as in `verify_tree`; siblings have different tokens.
        parents: ``[bs, N] int32``, as in `verify_tree`.
        depths: ``[bs, N] int32``, 0 for the root.
        num_nodes: ``[bs] int32``, number of nodes of each tree; later columns are ignored.
        ancestors: ``[bs, N, words] int32``, ancestor bits including the node's own.
        chosen: ``[bs, N] int64``, the token chosen after each node; not changed.
        positions: ``[bs] int64``, index of the token after the root.
        seeds: ``[bs] int64``, as in `gumbel_noise`.
        thresholds: ``[D] fp32``, descending. Entry i is ``-ln(-ln s)``, where s is the probability that at
            least i + 1 drafts are accepted.
        vocab_size: Size of the vocabulary, larger than the number of siblings.

    Returns:
        The rewritten chosen tokens, ``[bs, N] int64``.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        A root (token 5) has a child (6) and a grandchild (7). Thresholds of infinity accept every draft, so 6
        and 7 replace the chosen tokens after the first two nodes. The last chosen token stays.

        >>> import torch
        >>> from outrider.kernels.synthetic_acceptance import synthetic_acceptance
        >>> tokens, parents = torch.tensor([[5, 6, 7]]).int(), torch.tensor([[-1, 0, 1]]).int()
        >>> depths, num_nodes = torch.tensor([[0, 1, 2]]).int(), torch.tensor([3]).int()
        >>> ancestors = torch.tensor([[[0b001], [0b011], [0b111]]]).int()
        >>> chosen, one, always = torch.tensor([[90, 91, 92]]), torch.tensor([1]), torch.full((2,), torch.inf)
        >>> synthetic_acceptance(
        ...     tokens, parents, depths, num_nodes, ancestors, chosen, one, one, always, 100
        ... ).tolist()
        [[6, 7, 92]]
    """
    bs, nodes = tokens.shape
    for name, tensor in (("tokens", tokens), ("parents", parents), ("depths", depths)):
        expect(name, tensor, (bs, nodes), torch.int32)
    expect("num_nodes", num_nodes, (bs,), torch.int32)
    expect("ancestors", ancestors, (bs, nodes, None), torch.int32)
    expect("chosen", chosen, (bs, nodes), torch.int64)
    expect("positions", positions, (bs,), torch.int64)
    expect("seeds", seeds, (bs,), torch.int64)
    expect("thresholds", thresholds, (None,), torch.float32)
    arguments = (
        tokens,
        parents,
        depths,
        num_nodes,
        ancestors,
        chosen,
        positions,
        seeds,
        thresholds,
        vocab_size,
    )
    if use_triton(tokens):
        from outrider.kernels.synthetic_acceptance import triton as compiled

        return compiled.synthetic_acceptance(*arguments)
    return reference.synthetic_acceptance(*arguments)


def packed_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    starts: torch.Tensor,
    num_nodes: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Rewrite chosen tokens like `synthetic_acceptance`, for trees in packed rows (see `packed_round`).

    Args:
        tokens, parents, depths: ``[M] int32``. Node n of tree e is row ``starts[e] + n``.
        ancestors: ``[M, words] int32``, ancestor masks over the nodes of the row's tree.
        starts: ``[E + 1] int32``, ascending. Tree e owns the rows ``[starts[e], starts[e + 1])``.
        num_nodes: ``[E] int32``. Rows past a tree's nodes, and past all trees, keep their chosen token.
        chosen: ``[M] int64``; not changed.
        positions: ``[M] int64``, index of the token after each row. Only entries of roots are read.
        seeds: ``[M] int64``. Only entries of roots are read.
        thresholds, vocab_size: As in `synthetic_acceptance`.

    Returns:
        The rewritten chosen tokens, ``[M] int64``.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        The first tree is a single root. The second tree is the example of `synthetic_acceptance`. The last
        row is padding.

        >>> import torch
        >>> from outrider.kernels.synthetic_acceptance import packed_acceptance
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> tokens, parents, depths = ints(4, 5, 6, 7, 0), ints(-1, -1, 0, 1, 0), ints(0, 0, 1, 2, 0)
        >>> ancestors, starts, num_nodes = ints([1], [1], [3], [7], [0]), ints(0, 1, 4), ints(1, 3)
        >>> chosen, ones = torch.tensor([89, 90, 91, 92, 93]), torch.ones(5, dtype=torch.int64)
        >>> always = torch.full((2,), torch.inf)
        >>> packed_acceptance(
        ...     tokens, parents, depths, ancestors, starts, num_nodes, chosen, ones, ones, always, 100
        ... ).tolist()
        [89, 6, 7, 92, 93]
    """
    rows, trees = tokens.shape[0], num_nodes.shape[0]
    for name, tensor in (("tokens", tokens), ("parents", parents), ("depths", depths)):
        expect(name, tensor, (rows,), torch.int32)
    expect("ancestors", ancestors, (rows, None), torch.int32)
    expect("starts", starts, (trees + 1,), torch.int32)
    expect("num_nodes", num_nodes, (trees,), torch.int32)
    for name, tensor in (("chosen", chosen), ("positions", positions), ("seeds", seeds)):
        expect(name, tensor, (rows,), torch.int64)
    expect("thresholds", thresholds, (None,), torch.float32)
    arguments = (
        tokens,
        parents,
        depths,
        ancestors,
        starts,
        num_nodes,
        chosen,
        positions,
        seeds,
        thresholds,
        vocab_size,
    )
    if use_triton(tokens):
        from outrider.kernels.synthetic_acceptance import triton as compiled

        return compiled.packed_acceptance(*arguments)
    return reference.packed_acceptance(*arguments)
