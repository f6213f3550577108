"""skinny_gemm in plain torch; the contract is in the package's docstring."""

from __future__ import annotations

import torch
from torch.nn import functional


def project(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """See `outrider.kernels.skinny_gemm.project`."""
    if scales is None:
        return functional.linear(x, weight)
    return (functional.linear(x.float(), weight.float()) * scales).to(x.dtype)
