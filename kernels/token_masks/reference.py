"""Torch reference of token_masks. `kernels.token_masks` documents the op."""

from __future__ import annotations

import torch


def mask_tokens(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    flags = (allowed[:, :, None] >> bits & 1).view(allowed.shape[0], -1)[:, : logits.shape[1]]
    return logits.float().masked_fill(flags == 0, -torch.inf)
