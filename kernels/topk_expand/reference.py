"""topk_expand in plain torch; the contract is in the package's docstring."""

from __future__ import annotations

import numpy as np
import torch

from outrider.kernels._order import ranked_indices, ranked_topk
from outrider.kernels.philox.reference import gumbel_noise
from outrider.kernels.topk_expand.types import Expansion, Noise


def topk_expand(logits: torch.Tensor, parent_scores: torch.Tensor, topk: int, d2t: torch.Tensor | None, noise: Noise | None) -> Expansion:
    """See `outrider.kernels.topk_expand.topk_expand`."""
    plain = logits.float()
    values = plain if noise is None else _coupled(plain, d2t, noise)
    ids = ranked_topk(values, topk)[1]
    logprobs = plain.log_softmax(dim=-1).gather(1, ids)
    added = logprobs if noise is None else values.log_softmax(dim=-1).gather(1, ids)
    tokens = ids if d2t is None else ids + d2t[ids]
    return Expansion(tokens.to(torch.int32), parent_scores[:, None] + added, logprobs)


def _coupled(plain: torch.Tensor, d2t: torch.Tensor | None, noise: Noise) -> torch.Tensor:
    """Return logits over temperature plus noise for the rows with a temperature, the logits themselves for the others."""
    vocab = plain.shape[1]
    tokens = vocab if d2t is None else d2t + torch.arange(vocab, device=d2t.device)
    sampled = (noise.temperature > 0)[:, None]
    scaled = plain / torch.where(sampled, noise.temperature[:, None], 1.0)
    return torch.where(sampled, scaled + gumbel_noise(noise.seeds, noise.positions, noise.choices, tokens), plain)


def select_beam(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """See `outrider.kernels.topk_expand.select_beam`."""
    return torch.from_numpy(ranked_indices(scores, topk).astype(np.int32)).to(scores.device)
