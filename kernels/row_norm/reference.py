"""row_norm in plain torch: one row after the other. The contract is in the package's docstring."""

from __future__ import annotations

import torch
from torch.nn import functional


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `outrider.kernels.row_norm.row_norm`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row in range(x.shape[0]):
        # Copied, so that its address is aligned alike whatever row it was.
        out[row] = functional.rms_norm(x[row].float().clone(), x.shape[-1:], None, eps) * weight.float()
    return out
