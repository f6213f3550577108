"""Torch reference of round_trade, for slots in host memory. `kernels.round_trade` documents the ops."""

from __future__ import annotations

import ctypes

import torch


def post_blob(blob: torch.Tensor, slot: int, number: int) -> None:
    """Compute `outrider.kernels.round_trade.post_blob` for a slot in host memory."""
    ctypes.memmove(slot, blob.data_ptr(), blob.nbytes)
    ctypes.c_int32.from_address(slot).value = number


def fetch_blob(slot: int, blob: torch.Tensor, passed: int, number: int) -> None:
    """Compute `outrider.kernels.round_trade.fetch_blob` for a slot in host memory."""
    ctypes.c_int32.from_address(passed).value = number
    ctypes.memmove(blob.data_ptr(), slot, blob.nbytes)


def admit_counts(number: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor) -> None:
    counts.mul_((number == expected).to(torch.int32))


def pack_trees(
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    out_nodes: torch.Tensor,
    out_tokens: torch.Tensor,
    out_parents: torch.Tensor,
) -> None:
    out_nodes.copy_(num_nodes)
    out_tokens.copy_(tokens)
    out_parents.copy_(parents)
