"""topk_expand in plain torch; the contract is in the package's docstring."""

from __future__ import annotations

import torch

from outrider.kernels._order import ranked_topk
from outrider.kernels.philox.reference import gumbel_noise
from outrider.kernels.topk_expand.types import Expansion

Noise = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def topk_expand(logits: torch.Tensor, parent_scores: torch.Tensor, topk: int, d2t: torch.Tensor | None, noise: Noise | None) -> Expansion:
    """See `outrider.kernels.topk_expand.topk_expand`; `noise` is (temperature, seeds, positions, choices)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values = logprobs if noise is None else _coupled(logprobs, d2t, noise)
    scores, ids = ranked_topk(values, topk)
    tokens = ids if d2t is None else ids + d2t[ids]
    return Expansion(tokens.to(torch.int32), parent_scores[:, None] + scores, logprobs.gather(1, ids))


def _coupled(logprobs: torch.Tensor, d2t: torch.Tensor | None, noise: Noise) -> torch.Tensor:
    """Return the perturbed and renormalised vector of the rows with a temperature, the plain one of the others."""
    temperature, seeds, positions, choices = noise
    vocab = logprobs.shape[1]
    tokens = vocab if d2t is None else d2t + torch.arange(vocab, device=d2t.device)
    sampled = (temperature > 0)[:, None]
    scaled = logprobs / torch.where(temperature > 0, temperature, 1.0)[:, None]
    perturbed = torch.log_softmax(scaled + gumbel_noise(seeds, positions, choices, tokens), dim=-1)
    return torch.where(sampled, perturbed, logprobs)


def select_beam(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """See `outrider.kernels.topk_expand.select_beam`."""
    return ranked_topk(scores, topk)[1].to(torch.int32)
