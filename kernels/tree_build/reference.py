"""tree_build in plain torch; the contract is in the package's docstring."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from outrider.kernels._order import ranked_topk
from outrider.kernels.tree_build.types import DraftTreeTensors

WORD_BITS = 32


def tree_build(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, root_tokens: torch.Tensor, max_nodes: torch.Tensor, num_columns: int
) -> DraftTreeTensors:
    """See `outrider.kernels.tree_build.tree_build`."""
    total = scores.shape[1]
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best, picked = ranked_topk(scores, min(num_columns - 1, total))
    ranks = torch.arange(picked.shape[1], device=scores.device)
    kept = (ranks < max_nodes[:, None] - 1) & (best > -torch.inf)
    # `total` stands for "no candidate"; sorting by index puts parents before children and the padding last.
    nodes = pad(torch.where(kept, picked, total).sort(dim=1).values, (1, num_columns - 1 - picked.shape[1]), value=total)  # [bs, N]
    is_node = nodes < total
    source = nodes.clamp(max=max(0, total - 1))
    node_tokens = torch.where(is_node, tokens.gather(1, source), 0) if total else torch.zeros_like(nodes, dtype=torch.int32)
    node_tokens[:, 0] = root_tokens
    node_parents = _parents(parents, source, is_node)
    num_nodes = kept.sum(dim=1, dtype=torch.int32) + 1
    reach = _reach(node_parents, num_nodes)
    return DraftTreeTensors(
        tokens=node_tokens,
        parents=node_parents,
        depths=(reach.sum(dim=2, dtype=torch.int32) - 1).clamp_(min=0),
        num_nodes=num_nodes,
        ancestors=_pack(reach),
        candidates=torch.where(is_node, source, -1).to(torch.int32),
    )


def _parents(parents: torch.Tensor, source: torch.Tensor, is_node: torch.Tensor) -> torch.Tensor:
    """Return the node index of every node's parent, ``[bs, N] int32``; -1 for the root, padding and orphans."""
    bs, total = parents.shape
    columns = source.shape[1]
    if not total:
        return torch.full((bs, columns), -1, dtype=torch.int32, device=parents.device)
    # Candidate c's node number is stored at c + 1, so that index 0 (parent -1) is the root; the extra last entry swallows the padding.
    numbers = torch.arange(columns, dtype=torch.int32, device=parents.device).expand(bs, -1)
    number_of = torch.full((bs, total + 2), -1, dtype=torch.int32, device=parents.device)
    number_of.scatter_(1, torch.where(is_node, source + 1, total + 1), numbers)
    number_of[:, 0] = 0
    return torch.where(is_node, number_of.gather(1, parents.gather(1, source).long() + 1), -1)


def _reach(parents: torch.Tensor, num_nodes: torch.Tensor) -> torch.Tensor:
    """Return ``[bs, N, N] bool``: column j is node i itself or one of its ancestors; rows of padding are empty."""
    columns = parents.shape[1]
    numbers = torch.arange(columns, device=parents.device)
    step = ((parents[:, :, None] == numbers) | torch.eye(columns, dtype=torch.bool, device=parents.device)).float()
    hops = 1
    while hops < columns - 1:  # squaring doubles the distance covered
        step = torch.bmm(step, step).clamp_(max=1)
        hops *= 2
    return (step > 0) & (numbers < num_nodes[:, None])[:, :, None]


def _pack(reach: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``[bs, N, N] bool`` as 32-bit words, ``[bs, N, words] int32``."""
    bs, columns, _ = reach.shape
    words = -(-columns // WORD_BITS)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=reach.device)
    bits = pad(reach, (0, words * WORD_BITS - columns)).view(bs, columns, words, WORD_BITS)
    return (bits.int() << shifts).sum(dim=3, dtype=torch.int32)
