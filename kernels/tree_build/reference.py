"""Reference version of tree_build, which builds trees on the host, node by node.

`kernels.tree_build` documents the op.

Trees are small, so tensor operations would be slower.
"""

from __future__ import annotations

import math

import torch

from outrider.kernels._order import ranked_indices
from outrider.kernels.tree_build.types import DraftTreeTensors

WORD_BITS = 32


def tree_build(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    root_tokens: torch.Tensor,
    max_nodes: torch.Tensor,
    num_columns: int,
    logprobs: torch.Tensor | None,
) -> DraftTreeTensors:
    words = -(-num_columns // WORD_BITS)
    ranked = ranked_indices(scores, min(num_columns - 1, scores.shape[1])).tolist()
    batch = zip(
        ranked,
        scores.tolist(),
        tokens.tolist(),
        parents.tolist(),
        root_tokens.tolist(),
        max_nodes.tolist(),
        strict=True,
    )
    rows = [_build(best[: max(0, budget - 1)], *candidates) for best, *candidates, budget in batch]

    def column(values: list[list[int]], fill: int) -> torch.Tensor:
        padded = [row + [fill] * (num_columns - len(row)) for row in values]
        return torch.tensor(padded, dtype=torch.int32, device=scores.device).view(-1, num_columns)

    masks = [
        [_word(mask, word) for mask in row for word in range(words)] + [0] * words * (num_columns - len(row))
        for *_, row in rows
    ]
    candidates = column([row[3] for row in rows], -1)
    drafted = None
    if logprobs is not None:
        drafted = torch.where(
            candidates >= 0, logprobs.gather(1, candidates.clamp(min=0).to(torch.int64)), 0.0
        )
    return DraftTreeTensors(
        tokens=column([row[0] for row in rows], 0),
        parents=column([row[1] for row in rows], -1),
        depths=column([row[2] for row in rows], 0),
        num_nodes=torch.tensor([len(row[0]) for row in rows], dtype=torch.int32, device=scores.device),
        ancestors=torch.tensor(masks, dtype=torch.int32, device=scores.device).view(-1, num_columns, words),
        candidates=candidates,
        logprobs=drafted,
    )


def _build(
    best: list[int], scores: list[float], tokens: list[int], parents: list[int], root_token: int
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return tokens, parents, depths, candidates and ancestor masks of one tree's nodes, root first."""
    kept = sorted(candidate for candidate in best if scores[candidate] > -math.inf)  # false for NaN too
    number = {-1: 0}  # candidate -> node
    node_parents, depths, masks = [-1], [0], [1]
    for node, candidate in enumerate(kept, 1):
        number[candidate] = node
        parent = number.get(parents[candidate], -1)
        node_parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return [root_token, *(tokens[candidate] for candidate in kept)], node_parents, depths, [-1, *kept], masks


def _word(mask: int, word: int) -> int:
    """Return the given 32-bit word of a mask as a signed integer."""
    bits = mask >> WORD_BITS * word & 0xFFFFFFFF
    return bits - (bits >> WORD_BITS - 1 << WORD_BITS)
