"""top-k, top-p and min-p on scaled logits, without asking the device anything: both versions of verify use these torch ops."""

from __future__ import annotations

import torch


def filter_logits(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the scores with every token that a filter removes set to -inf; order and ties as `choose_tokens` says.

    Args:
        scores: ``[rows, V] fp32``, logits over temperature.
        top_k: ``[rows] int32``, 0 = off.
        top_p: ``[rows] fp32``, 1 = off.
        min_p: ``[rows] fp32``, 0 = off.

    Returns:
        ``[rows, V] fp32``.
    """
    vocab = scores.shape[1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=scores.device)
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    in_top_k = rank < limit
    probs = ordered.masked_fill(~in_top_k, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of everything ranked above
    kept = in_top_k & ((before < top_p[:, None]) | (top_p >= 1)[:, None]) & (probs >= min_p[:, None] * probs[:, :1])
    kept[:, 0] = True
    return scores.masked_fill(~torch.zeros_like(kept).scatter_(1, order, kept), -torch.inf)
