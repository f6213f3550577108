"""Torch reference of topk_expand. `kernels.topk_expand` documents the ops."""

from __future__ import annotations

import numpy as np
import torch

from outrider.kernels._order import ranked_indices, ranked_topk
from outrider.kernels.philox.reference import gumbel_noise
from outrider.kernels.topk_expand.types import Beam, Candidates, Expansion, Noise


def topk_expand(
    logits: torch.Tensor,
    parent_scores: torch.Tensor,
    topk: int,
    d2t: torch.Tensor | None,
    noise: Noise | None,
) -> Expansion:
    plain = logits.float()
    values = plain if noise is None else _coupled(plain, d2t, noise)
    ids = ranked_topk(values, topk)[1]
    logprobs = plain.log_softmax(dim=-1).gather(1, ids)
    added = logprobs if noise is None else values.log_softmax(dim=-1).gather(1, ids)
    tokens = ids if d2t is None else ids + d2t[ids]
    return Expansion(tokens.to(torch.int32), parent_scores[:, None] + added, logprobs)


def _coupled(plain: torch.Tensor, d2t: torch.Tensor | None, noise: Noise) -> torch.Tensor:
    """Return ``logits / temperature + noise`` for rows with a temperature, and the logits for other rows."""
    vocab = plain.shape[1]
    tokens = vocab if d2t is None else d2t + torch.arange(vocab, device=d2t.device)
    sampled = (noise.temperature > 0)[:, None]
    scaled = plain / torch.where(sampled, noise.temperature[:, None], 1.0)
    return torch.where(
        sampled, scaled + gumbel_noise(noise.seeds, noise.positions, noise.choices, tokens), plain
    )


def select_beam(scores: torch.Tensor, topk: int) -> torch.Tensor:
    return torch.from_numpy(ranked_indices(scores, topk).astype(np.int32)).to(scores.device)


def expand_level(
    logits: torch.Tensor,
    beam: Beam | None,
    level: int,
    topk: int,
    candidates: Candidates,
    words: int,
    last: bool,
    d2t: torch.Tensor | None,
    noise: Noise | None,
) -> Beam | None:
    bs, device = candidates.scores.shape[0], logits.device
    width = logits.shape[0] // bs
    if noise is not None and not bool((noise.temperature > 0).any()):
        noise = None
    if noise is not None:
        temperature, seeds, positions, choices = (part.repeat_interleave(width) for part in noise)
        noise = Noise(temperature, seeds, positions.to(torch.int64) + level, choices)
    scores = torch.zeros(bs, device=device) if beam is None else beam.scores
    children = topk_expand(logits, scores, topk, d2t, noise)
    # 1. Store the children as candidates.
    columns = candidates.level(level, topk)
    candidates.scores[:, columns] = children.scores.view(bs, -1)
    candidates.tokens[:, columns] = children.token_ids.view(bs, -1)
    candidates.logprobs[:, columns] = children.logprobs.view(bs, -1)
    candidates.parents[:, columns] = (
        -1 if beam is None else beam.candidates.view(bs, topk).repeat_interleave(topk, 1)
    )
    if last:
        return None
    # 2. Select the next beam.
    chosen = select_beam(children.scores.view(bs, width * topk), topk).to(torch.int64)  # [bs, topk]
    sequence = torch.arange(bs, device=device)[:, None]
    child = (chosen + sequence * (width * topk)).view(-1)
    parents = child // topk
    column = torch.arange(topk, device=device).repeat(bs) + level * topk
    bit = torch.ones((), dtype=torch.int32, device=device) << (column % 32).to(torch.int32)
    ancestors = (
        torch.zeros(bs * topk, words, dtype=torch.int32, device=device)
        if beam is None
        else beam.ancestors[parents]
    )
    ancestors[torch.arange(bs * topk, device=device), column // 32] |= bit
    return Beam(
        tokens=children.token_ids.view(-1)[child],
        scores=children.scores.view(-1)[child],
        parents=parents.to(torch.int32),
        candidates=(chosen + columns.start).view(-1).to(torch.int32),
        ancestors=ancestors,
    )
