"""round_trade in torch; the contract is in the package's docstring."""

from __future__ import annotations

import torch


def admit_counts(number: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor) -> None:
    """See `outrider.kernels.round_trade.admit_counts`."""
    counts.mul_((number == expected).to(torch.int32))


def pack_trees(
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    out_nodes: torch.Tensor,
    out_tokens: torch.Tensor,
    out_parents: torch.Tensor,
) -> None:
    """See `outrider.kernels.round_trade.pack_trees`."""
    out_nodes.copy_(num_nodes)
    out_tokens.copy_(tokens)
    out_parents.copy_(parents)
