"""post_round: writes the result of each round to the next entry of a ring in pinned host memory."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.post_round import reference

__all__ = ["post_round"]


def post_round(packed: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Write a round's result to the next entry of a ring buffer, which the host reads without a further copy.

    Args:
        packed: ``[bs, C] int32``, contiguous.
        ring: ``[K, bs, C] int32``, contiguous; in pinned host memory if `packed` is on a GPU.
        turn: ``[1] int32`` on the device of `packed`: the entry to write, 0 to K - 1. The op advances `turn`
            by one, modulo K.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.post_round import post_round
        >>> ring, turn = torch.zeros(2, 1, 3, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        >>> post_round(torch.tensor([[4, 5, 6]], dtype=torch.int32), ring, turn)
        >>> ring.tolist(), turn.tolist()
        ([[[0, 0, 0]], [[4, 5, 6]]], [0])
    """
    bs, columns = packed.shape
    expect("packed", packed, (bs, columns), torch.int32)
    expect("ring", ring, (None, bs, columns), torch.int32)
    expect("turn", turn, (1,), torch.int32)
    expect_contiguous("packed", packed)
    expect_contiguous("ring", ring)
    if use_triton(packed):
        from outrider.kernels.post_round import triton as compiled

        compiled.post_round(packed, ring, turn)
        return
    reference.post_round(packed, ring, turn)
