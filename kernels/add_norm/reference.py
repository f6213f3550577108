"""Torch reference of add_norm. `kernels.add_norm` documents the ops."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.kernels.stream import ResidualStream, normed_on_write


def add_sums(
    parts: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> ResidualStream:
    total = residual.float() + (parts.sum(0) if parts.dim() == 3 else parts.float())
    if bias is not None:
        total = total + bias.float()
    return _stream(total.to(residual.dtype) if out is None else out.copy_(total), norm_weight, eps)


def embed_rows(
    tokens: torch.Tensor, table: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> ResidualStream:
    return _stream(functional.embedding(tokens, table), norm_weight, eps)


def normalise(stream: ResidualStream) -> torch.Tensor:
    inverse = stream.inverse_rms()
    return stream.scaled if inverse is None else (stream.scaled.float() * inverse).to(stream.scaled.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    normed = (functional.rms_norm(x.float(), (x.shape[1],), None, eps) * weight.float()).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def _stream(residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> ResidualStream:
    wide = residual.float()
    if normed_on_write(residual.shape[0], residual.dtype):
        return ResidualStream(residual, rms_norm(residual, norm_weight, eps, None), None, eps)
    return ResidualStream(
        residual, (wide * norm_weight.float()).to(residual.dtype), wide.square().sum(-1)[None], eps
    )
