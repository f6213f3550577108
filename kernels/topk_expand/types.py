"""The result of an expansion."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Expansion(NamedTuple):
    """The best children of every row, best first.

    Attributes:
        token_ids: ``[rows, topk] int32``, target ids.
        scores: ``[rows, topk] fp32``, cumulative: the parent's score plus this step's, never above the parent's.
        logprobs: ``[rows, topk] fp32``, the draft's own log-probability of the token (temperature and noise left out).
    """

    token_ids: torch.Tensor
    scores: torch.Tensor
    logprobs: torch.Tensor
