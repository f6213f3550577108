"""Torch reference of head_input. `kernels.head_input` documents the ops."""

from __future__ import annotations

import torch
from torch.nn import functional


def head_input(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    features: torch.Tensor,
    rows: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    feature_norm: torch.Tensor | None,
    eps: float,
    normed_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    taken = features if rows is None else features.index_select(0, rows)
    feature = _norm(taken, feature_norm, eps).to(embedding.dtype)
    pair = torch.cat(
        [_norm(functional.embedding(tokens, embedding), embedding_norm, eps).to(embedding.dtype), feature],
        dim=-1,
    )
    return pair, feature if normed_residual else taken.to(embedding.dtype)


def feature_input(
    features: torch.Tensor, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, normed_residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    taken = features if rows is None else features.index_select(0, rows)
    feature = _norm(taken, norm, eps).to(norm.dtype)
    return feature, feature if normed_residual else taken.to(norm.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
