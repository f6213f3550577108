"""Data types of topk_expand: noise parameters, expanded children, a tree's candidates, and the beam."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels import _launch


class Noise(NamedTuple):
    """Parameters of the sampling noise that draft and target share; one entry per row.

    Attributes:
        temperature: ``[rows] fp32``; 0 adds no noise to the row.
        seeds: ``[rows] int64``, as in `gumbel_noise`.
        positions: ``[rows]`` int64 or int32, position of the child's token.
        choices: ``[rows] int32``, as in `gumbel_noise`.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


class Expansion(NamedTuple):
    """The best children of every row (tree node), best first.

    Attributes:
        token_ids: ``[rows, topk] int32``, target ids.
        scores: ``[rows, topk] fp32``, cumulative scores: the parent's score plus the score of this step. A
            child's score is never above the parent's.
        logprobs: ``[rows, topk] fp32``, the draft's own log-probability of the token, without temperature and
            noise.
    """

    token_ids: torch.Tensor
    scores: torch.Tensor
    logprobs: torch.Tensor


class Candidates(NamedTuple):
    """All candidate nodes that the levels of a draft tree have scored, in level order.

    The first `topk` candidates are children of the root. Each later level adds ``topk * topk`` candidates.

    Attributes:
        scores: ``[bs, C] fp32``, cumulative scores.
        tokens: ``[bs, C] int32``, target ids.
        parents: ``[bs, C] int32``, candidate index of the parent; -1 for children of the root.
        logprobs: ``[bs, C] fp32``, the draft's own log-probability of the token.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    logprobs: torch.Tensor

    @staticmethod
    def make(bs: int, depth: int, topk: int, device: torch.device) -> Candidates:
        """Allocate the candidates of trees. The contents are undefined until each level is written."""
        columns = (bs, num_candidates(depth, topk))
        scores, logprobs = (_launch.empty(columns, torch.float32, device) for _ in range(2))
        tokens, parents = (_launch.empty(columns, torch.int32, device) for _ in range(2))
        return Candidates(scores, tokens, parents, logprobs)

    def level(self, level: int, topk: int) -> slice:
        """Return the columns of candidates added by level `level` (0: children of the root)."""
        first = 0 if level == 0 else topk + (level - 1) * topk * topk
        return slice(first, first + (topk if level == 0 else topk * topk))


def num_candidates(depth: int, topk: int) -> int:
    """Return the number of candidates that a tree of `depth` levels scores.

    Example:
        >>> from outrider.kernels.topk_expand import num_candidates
        >>> num_candidates(depth=3, topk=2)  # 2 children of the root, then 2 * 2 per level
        10
    """
    return topk + (depth - 1) * topk * topk


class Beam(NamedTuple):
    """The beam of a tree level, i.e. the nodes to expand next: `topk` adjacent rows per sequence, best first.

    Attributes:
        tokens: ``[rows] int32``, target ids.
        scores: ``[rows] fp32``, cumulative scores.
        parents: ``[rows] int32``, each row's parent among the rows of the previous level (the roots for level
            1).
        candidates: ``[rows] int32``, each row's candidate index in its sequence.
        ancestors: ``[rows, words] int32``, mask of the scratch columns that each row sees: its own column and
            the columns of its ancestors. Every beam row of every level has one scratch column. Row j of level
            i (from 1) has column ``(i - 1) * topk + j``.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    candidates: torch.Tensor
    ancestors: torch.Tensor
