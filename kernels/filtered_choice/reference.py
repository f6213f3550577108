"""Torch reference of filtered_choice, which sorts with `kernels/verify/filters.py`.

`kernels.filtered_choice` documents the op.
"""

from __future__ import annotations

import torch

from outrider.kernels.filtered_choice.types import Kept
from outrider.kernels.verify.filters import filter_logits
from outrider.kernels.verify.types import SamplingTensors

LEAST_KEY = -(1 << 31)


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return logits divided by temperature, ``[rows, V] fp32``; rows with temperature 0 are not divided."""
    return logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]


def token_keys(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return integer keys ``[rows, V] int32`` that order tokens by score; equal scores have equal keys.

    The key of a bf16 logit is the upper half of its fp32 bits. Different bf16 logits have different scores at
    any temperature, so these keys do not need the temperature.
    """
    scores = logits.float() if logits.dtype is torch.bfloat16 else scaled(logits, temperature)
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered >> 16 if logits.dtype is torch.bfloat16 else ordered


def kept_tokens(logits: torch.Tensor, sampling: SamplingTensors) -> Kept:
    warm = sampling.temperature > 0
    top_k = torch.where(warm, sampling.top_k, 0)
    top_p = torch.where(warm, sampling.top_p, 1.0)
    scores = scaled(logits, sampling.temperature)
    kept = filter_logits(scores, top_k, top_p, torch.zeros_like(top_p)) > -torch.inf
    kept |= ((top_k <= 0) & (top_p >= 1))[:, None]
    keys = token_keys(logits, sampling.temperature)
    least = torch.where(kept, keys.long(), 1 << 31).amin(dim=1)
    everything = kept.all(dim=1)
    ties = (kept & (keys == least[:, None])).sum(dim=1)
    none = -(1 << 15) if logits.dtype is torch.bfloat16 else LEAST_KEY
    return Kept(
        torch.where(everything, none, least).to(torch.int32), torch.where(everything, 0, ties).to(torch.int32)
    )
