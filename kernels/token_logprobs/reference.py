"""Torch reference of token_logprobs. `kernels.token_logprobs` documents the op."""

from __future__ import annotations

import torch

from outrider.kernels._order import ranked_topk
from outrider.kernels.token_logprobs.types import MAX_TOP, WORDS


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, tops: torch.Tensor
) -> torch.Tensor:
    result = torch.zeros((rows.shape[0], WORDS), dtype=torch.int32, device=logits.device)
    result[:, 1 : 1 + MAX_TOP] = -1
    wanted = (tops >= 0).nonzero().squeeze(1)
    if not wanted.numel():
        return result
    scores = logits[rows[wanted]].float()
    total = scores.logsumexp(dim=1)
    token = tokens[wanted]
    own = scores.gather(1, token.clamp(min=0)[:, None])[:, 0] - total
    result[wanted, 0] = torch.where(token >= 0, own, 0.0).view(torch.int32)
    most = min(int(tops[wanted].max()), scores.shape[1])
    if most:
        values, ids = ranked_topk(scores, most)
        listed = torch.arange(most, device=ids.device) < tops[wanted][:, None]
        result[wanted, 1 : 1 + most] = torch.where(listed, ids, -1).int()
        logprobs = torch.where(listed, values - total[:, None], 0.0)
        result[wanted, 1 + MAX_TOP : 1 + MAX_TOP + most] = logprobs.view(torch.int32)
    return result
