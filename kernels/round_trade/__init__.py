"""round_trade: the ends of a draft's round for a target in another process: whether the state that came counts, and trees packed to go."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous

__all__ = ["admit_counts", "pack_trees"]


def admit_counts(number: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor) -> None:
    """Let every row go idle, in place, unless ``number == expected``: a state that did not come in time is one of an earlier round.

    Args:
        number: ``[1] int32``, of the round that the state says it is for.
        expected: ``[1] int32``, of this round.
        counts: ``[bs] int32``, contiguous; changed.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    expect("number", number, (1,), torch.int32)
    expect("expected", expected, (1,), torch.int32)
    expect("counts", counts, (None,), torch.int32)
    expect_contiguous("counts", counts)
    if use_triton(counts):
        from outrider.kernels.round_trade import triton as compiled

        compiled.admit_counts(number, expected, counts)
        return
    from outrider.kernels.round_trade import reference

    reference.admit_counts(number, expected, counts)


def pack_trees(
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    out_nodes: torch.Tensor,
    out_tokens: torch.Tensor,
    out_parents: torch.Tensor,
) -> None:
    """Copy trees to where they go from.

    Args:
        num_nodes: ``[bs] int32``.
        tokens, parents: ``[bs, N] int32``, contiguous.
        out_nodes, out_tokens, out_parents: Of the same shapes, contiguous.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    bs, nodes = tokens.shape
    planes = {"tokens": tokens, "parents": parents, "out_tokens": out_tokens, "out_parents": out_parents}
    for name, tensor in planes.items():
        expect(name, tensor, (bs, nodes), torch.int32)
        expect_contiguous(name, tensor)
    for name, tensor in {"num_nodes": num_nodes, "out_nodes": out_nodes}.items():
        expect(name, tensor, (bs,), torch.int32)
        expect_contiguous(name, tensor)
    arguments = (num_nodes, tokens, parents, out_nodes, out_tokens, out_parents)
    if use_triton(tokens):
        from outrider.kernels.round_trade import triton as compiled

        compiled.pack_trees(*arguments)
        return
    from outrider.kernels.round_trade import reference

    reference.pack_trees(*arguments)
