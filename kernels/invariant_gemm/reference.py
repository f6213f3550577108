"""invariant_gemm in plain torch: one row after the other. The contract is in the package's docstring."""

from __future__ import annotations

import torch
from torch.nn import functional


def invariant_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """See `outrider.kernels.invariant_gemm.invariant_gemm`."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for row in range(x.shape[0]):
        # Copied, so that its address is aligned alike whatever row it was.
        total = functional.linear(x[row : row + 1].clone(), weight).float()
        if bias is not None:
            total += bias.float()
        if residual is not None:
            total += residual[row : row + 1].float()
        out[row] = total[0]
    return out
