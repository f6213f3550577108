"""Torch reference of invariant_gemm, one row at a time. `kernels.invariant_gemm` documents the op."""

from __future__ import annotations

import torch
from torch.nn import functional


def invariant_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for row in range(x.shape[0]):
        # torch selects kernels by address alignment. Clone the row, so that its alignment is the same at
        # every index.
        total = functional.linear(x[row : row + 1].clone(), weight).float()
        if bias is not None:
            total += bias.float()
        if residual is not None:
            total += residual[row : row + 1].float()
        out[row] = total[0]
    return out
