"""round_trade in torch; the contract is in the package's docstring."""

from __future__ import annotations

import ctypes

import torch


def post_blob(blob: torch.Tensor, slot: int, number: int) -> None:
    """See `outrider.kernels.round_trade.post_blob`; the slot is in memory of the host."""
    ctypes.memmove(slot, blob.data_ptr(), blob.nbytes)
    ctypes.c_int32.from_address(slot).value = number


def fetch_blob(slot: int, blob: torch.Tensor, passed: int, number: int) -> None:
    """See `outrider.kernels.round_trade.fetch_blob`; the slot is in memory of the host."""
    ctypes.c_int32.from_address(passed).value = number
    ctypes.memmove(blob.data_ptr(), slot, blob.nbytes)


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
