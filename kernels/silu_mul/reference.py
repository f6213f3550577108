"""Torch reference of silu_mul. `kernels.silu_mul` documents the op."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.kernels.stream import ResidualStream


def silu_mul(
    parts: torch.Tensor,
    stream: ResidualStream | None,
    bias: torch.Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    total = parts.sum(0) if parts.dim() == 3 else parts.float()
    inverse = None if stream is None else stream.inverse_rms()
    if inverse is not None:
        total = total * inverse
    if bias is not None:
        total = total + bias.float()
    gate, up = total.chunk(2, dim=-1)
    gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    return (gate * up).to(dtype)
