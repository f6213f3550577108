"""Torch reference of merge_attention. `kernels.merge_attention` documents the op."""

from __future__ import annotations

import torch


def merge_attention(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    lse = torch.logaddexp(first_lse, second_lse)
    base = torch.where(lse == -torch.inf, 0.0, lse)
    merged = torch.zeros(first.shape, dtype=torch.float32, device=first.device)
    for part, part_lse in ((first, first_lse), (second, second_lse)):
        weight = (part_lse - base).exp()[:, :, None]
        merged += torch.where(weight == 0.0, 0.0, part.float() * weight)
    out.copy_(merged)
    out_lse.copy_(lse)
