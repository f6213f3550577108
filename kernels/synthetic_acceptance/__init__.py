"""synthetic_acceptance: rewrite the chosen tokens so that the walk through a tree accepts a drawn number of drafts.

For measurements with random weights, where the draft never guesses right. Nothing that serves calls it.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.synthetic_acceptance import reference

__all__ = ["NOISE_CHOICE", "synthetic_acceptance"]

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
    """Return chosen tokens with which `verify_tree` accepts exactly k drafts of each row.

    k is the number of `thresholds` above the row's noise, ``gumbel_noise(seed, position, NOISE_CHOICE, 0)``, or the deepest node's depth if
    that is less. The path ends at the lowest node of depth k. The token after its last node stays what was chosen there, unless a child
    carries it: then the next higher token (modulo the vocabulary) that none carries. Everywhere else the chosen tokens stay.

    Args:
        tokens, parents, depths: ``[bs, N] int32``, trees as in `verify_tree`, depth 0 for the root; siblings carry different tokens.
        num_nodes: ``[bs] int32``; columns past it are ignored.
        ancestors: ``[bs, N, words] int32``, ancestor bits with the node's own.
        chosen: ``[bs, N] int64``; not changed.
        positions: ``[bs] int64``, index of the token after the root.
        seeds: ``[bs] int64``.
        thresholds: ``[D] fp32``, descending: ``-ln(-ln s)`` of the probabilities s that at least 1…D drafts are accepted.
        vocab_size: Above the number of siblings.

    Returns:
        ``[bs, N] int64``.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
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
