"""Applies top-k, top-p and min-p by sorting: always on a CPU, and as a fallback on a GPU.

The torch reference of `choose_tokens` always uses this module. The Triton version normally uses the search of
`kernels/filtered_choice`. `kernels/verify/triton.py` explains when it uses this module instead.

The filters are torch ops on scaled logits. On a GPU, none of these ops waits for the device.
"""

from __future__ import annotations

import torch

from outrider.kernels._order import ranked_topk

_HOST_WIDTH = 256  # on a CPU, sorting is the main cost, and this many best tokens decide most filters


def filter_logits(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Apply top-k, top-p and min-p: return the scores with every filtered-out token set to -inf.

    `choose_tokens` defines the order of the filters and the treatment of ties.

    Args:
        scores: ``[rows, V] fp32``, logits divided by temperature.
        top_k: ``[rows] int32``; 0 disables top-k.
        top_p: ``[rows] fp32``; 1 disables top-p.
        min_p: ``[rows] fp32``; 0 disables min-p.

    Returns:
        ``[rows, V] fp32``.

    Example:
        The first row keeps its two best tokens. The second row keeps its best token, whose probability is
        more than 0.9.

        >>> import torch
        >>> from outrider.kernels.verify.filters import filter_logits
        >>> scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 4.0, 1.0, 0.0]])
        >>> top_k = torch.tensor([2, 0], dtype=torch.int32)
        >>> filter_logits(scores, top_k, torch.tensor([1.0, 0.9]), torch.zeros(2))
        tensor([[3., -inf, 2., -inf],
                [-inf, 4., -inf, -inf]])
    """
    vocab = scores.shape[1]
    if not scores.is_cuda and vocab > 2 * _HOST_WIDTH:
        filtered, settled = _filter(scores, *ranked_topk(scores, _HOST_WIDTH), top_k, top_p, min_p)
        if bool(settled.all()):
            return filtered
    return _filter(scores, *scores.sort(dim=-1, descending=True, stable=True), top_k, top_p, min_p)[0]


def _filter(
    scores: torch.Tensor,
    ordered: torch.Tensor,
    order: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the filters to the best `width` tokens of each row only.

    `ordered` and `order` are the scores and ids of these tokens, ``[rows, width]``, best first.

    Returns:
        The filtered scores, and whether each row keeps no token beyond its best `width` tokens.
    """
    width = ordered.shape[1]
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    in_top_k = (top_k <= 0) | (torch.arange(width, device=scores.device) < top_k)
    best = ordered[:, :1]
    weights = (ordered - best).exp().masked_fill(~in_top_k, 0.0)
    total = torch.where(
        top_k > 0, weights.sum(dim=-1, keepdim=True), (scores - best).exp().sum(dim=-1, keepdim=True)
    )
    probs = weights / total
    before = probs.cumsum(dim=-1) - probs  # probability of all tokens ranked above
    kept = in_top_k & ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True  # the best token always stays
    settled = ((top_k > 0) & (top_k <= width)) | ((top_k <= 0) & ~kept[:, -1:])
    return torch.full_like(scores, -torch.inf).scatter_(
        1, order, ordered.masked_fill(~kept, -torch.inf)
    ), settled
