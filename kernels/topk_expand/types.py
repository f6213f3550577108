"""The data of an expansion."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels import _launch


class Noise(NamedTuple):
    """What couples the draft's choice to the target's: one entry per row, as in `gumbel_noise`.

    Attributes:
        temperature: ``[rows] fp32``; 0 = no noise in this row.
        seeds: ``[rows] int64``.
        positions: ``[rows]`` int64 or int32, of the child's token.
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


class Candidates(NamedTuple):
    """Every candidate that a tree's levels score, in level order: ``topk`` of the root, then ``topk * topk`` of each later level.

    Attributes:
        scores: ``[bs, C] fp32``, cumulative.
        tokens: ``[bs, C] int32``, target ids.
        parents: ``[bs, C] int32``, candidate index of the parent, -1 = the root.
        logprobs: ``[bs, C] fp32``, the draft's own.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    logprobs: torch.Tensor

    @staticmethod
    def make(bs: int, depth: int, topk: int, device: torch.device) -> Candidates:
        """Allocate the candidates of trees, to be filled level by level."""
        columns = (bs, num_candidates(depth, topk))
        scores, logprobs = (_launch.empty(columns, torch.float32, device) for _ in range(2))
        tokens, parents = (_launch.empty(columns, torch.int32, device) for _ in range(2))
        return Candidates(scores, tokens, parents, logprobs)

    def level(self, level: int, topk: int) -> slice:
        """Return the columns that the children of level `level` (0: of the root) take."""
        first = 0 if level == 0 else topk + (level - 1) * topk * topk
        return slice(first, first + (topk if level == 0 else topk * topk))


def num_candidates(depth: int, topk: int) -> int:
    """Return how many candidates a tree of `depth` levels scores."""
    return topk + (depth - 1) * topk * topk


class Beam(NamedTuple):
    """The rows of the level that runs next, ``bs * topk``, those of a sequence after one another, best first.

    Attributes:
        tokens: ``[rows] int32``, target ids.
        scores: ``[rows] fp32``, cumulative.
        parents: ``[rows] int32``, the row of the level before (of the roots, for level 1) that each is a child of.
        candidates: ``[rows] int32``, which candidate of its sequence each is.
        ancestors: ``[rows, words] int32``, which scratch columns each sees: beam row j of level i (from 1) has column
            ``(i - 1) * topk + j``; its own and its ancestors'.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    candidates: torch.Tensor
    ancestors: torch.Tensor
