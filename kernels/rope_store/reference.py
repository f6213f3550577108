"""Torch reference of rope_store. `kernels.rope_store` documents the ops."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.kernels.kv_store.reference import kv_store
from outrider.kernels.rope_store.types import Lookup
from outrider.kernels.stream import ResidualStream


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None, :]
    sign = torch.ones_like(frequencies)
    sign[: sign.shape[0] // 2] = -1
    return (angles.cos() * factor).to(dtype), (angles.sin() * sign * factor).to(dtype)


def rope_store(
    parts: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    slots: torch.Tensor,
    stream: ResidualStream | None,
    bias: torch.Tensor | None,
    head_norm: torch.Tensor | None,
    head_eps: float,
    lookup: Lookup | None,
) -> torch.Tensor:
    kv_heads, dim = k_plane.shape[2:]
    total = parts.sum(0) if parts.dim() == 3 else parts.float()
    inverse = None if stream is None else stream.inverse_rms()
    if inverse is not None:
        total = total * inverse
    if bias is not None:
        total = total + bias.float()
    if lookup is not None:
        total = total + lookup.rows()
    qkv = total.view(total.shape[0], -1, dim)
    rotated = qkv[:, :-kv_heads]
    if head_norm is not None:
        rotated = functional.rms_norm(rotated, (dim,), None, head_eps) * head_norm.float()
    rotated = rotated * cos.float() + rotated.roll(dim // 2, -1) * sin.float()
    rotated = rotated.to(cos.dtype)
    kv_store(rotated[:, -kv_heads:], qkv[:, -kv_heads:].to(cos.dtype), k_plane, v_plane, slots)
    return rotated[:, :-kv_heads].contiguous()
