"""The data of an expansion."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Noise(NamedTuple):
    """What couples the draft's choice to the target's: one entry per row, as in `gumbel_noise`.

    Attributes:
        temperature: ``[rows] fp32``; 0 = no noise in this row.
        seeds: ``[rows] int64``.
        positions: ``[rows] int64``, of the child's token.
        choices: ``[rows] int32``.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


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
