"""Draft trees as tensors: the shape of a tree, and a batch of trees with parents, depths and ancestor masks.

Node 0 is the root: the last committed token, whose K/V is not written yet. Parents precede children. A tree's
ancestor mask has one row for each node. A row consists of 32-bit words. In the row of node n, bit j of word w
is set if node 32·w + j is node n itself or one of its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASK_WORD_BITS = 32


def mask_words(num_columns: int) -> int:
    """Return the number of 32-bit words that `num_columns` mask bits need, which is at least 1."""
    return max(1, -(-num_columns // MASK_WORD_BITS))


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Size of the tree to draft for one sequence in one round.

    Attributes:
        depth: Number of levels below the root (SGLang: num_steps).
        topk: Number of nodes that are expanded on each level, and number of children that are considered for
            each of these nodes (SGLang: eagle_topk). With 1, the tree is a chain.
        max_nodes: Largest number of nodes to verify, including the root (SGLang: num_draft_tokens). With 1,
            the tree has no draft nodes.
    """

    depth: int
    topk: int
    max_nodes: int

    @property
    def drafts(self) -> bool:
        """Whether this shape includes any draft node."""
        return self.max_nodes > 1 and self.depth > 0

    @property
    def name(self) -> str:
        """The shape in words: ``plain``, ``chain 3`` or ``tree 5/4/16`` (depth, topk, nodes)."""
        if not self.drafts:
            return "plain"
        if self.topk == 1:
            return f"chain {self.depth}"
        return f"tree {self.depth}/{self.topk}/{self.max_nodes}"

    @property
    def columns(self) -> int:
        """Largest number of tokens that a round with this shape can choose for a sequence."""
        return min(self.depth, self.max_nodes - 1) + 1

    def bounded(self) -> DraftShape:
        """Return the shape with `max_nodes` limited to the number of nodes that depth and topk allow."""
        candidates = self.topk + (self.depth - 1) * self.topk * self.topk if self.depth > 0 else 0
        return DraftShape(self.depth, self.topk, min(self.max_nodes, 1 + candidates))


NO_DRAFT = DraftShape(depth=0, topk=1, max_nodes=1)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """A batch of trees, one per sequence, in batch order.

    Columns from `num_nodes` on are padding, with token 0 and parent -1.

    Attributes:
        tokens: ``[bs, N] int32``; column 0 is the root.
        parents: ``[bs, N] int32``; index of the parent node within the row, or -1 for the root.
        depths: ``[bs, N] int32``; 0 for the root.
        num_nodes: ``[bs] int32``; at least 1.
        ancestors: ``[bs, N, words] int32``. In the mask of node n, bit j of word w is set if node 32·w + j is
            node n itself or one of its ancestors.
        logprobs: ``[bs, N] fp32``, the draft's own log-probabilities, or None. Used only for tracing.
        draft_ms: Time, in milliseconds, that the draft reports for making the trees. Used only for tracing.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor
    ancestors: torch.Tensor
    logprobs: torch.Tensor | None = None
    draft_ms: float = 0.0
