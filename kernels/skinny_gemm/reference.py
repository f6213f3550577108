"""Torch reference of skinny_gemm. `kernels.skinny_gemm` documents the ops."""

from __future__ import annotations

import torch
from torch.nn import functional


def project(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return functional.linear(x, weight)
    return (functional.linear(x.float(), weight.float()) * scales).to(x.dtype)
