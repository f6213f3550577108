"""Grows draft trees on the host, pads them into a batch of tensors, and merges several batches into one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.shared.spec.tree import MASK_WORD_BITS, DraftBatch, mask_words

WORD_BYTES = MASK_WORD_BITS // 8


@dataclass(slots=True)
class HostTree:
    """One draft tree in host memory. Node 0 is the root. Call `add` for parents before their children.

    Attributes:
        tokens, parents, depths, logprobs: One entry per node.
        masks: One mask per node, with a bit for the node itself and for each of its ancestors.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    logprobs: list[float] = field(default_factory=lambda: [0.0])
    masks: list[int] = field(default_factory=lambda: [1])

    @classmethod
    def of_root(cls, root_token: int) -> HostTree:
        """Return a tree that consists of a root only."""
        return cls([root_token])

    def add(self, token: int, parent: int, logprob: float) -> int:
        """Append a node and return its index."""
        index = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.logprobs.append(logprob)
        self.masks.append(self.masks[parent] | 1 << index)
        return index


def pad_trees(trees: Sequence[HostTree], device: torch.device, draft_ms: float = 0.0) -> DraftBatch:
    """Copy draft trees into one batch of tensors. Every tree is padded to the size of the largest tree.

    All tensors are copied to the device together.
    """
    bs, width = len(trees), max(len(tree.tokens) for tree in trees)
    words = mask_words(width)
    packed = array("i")
    for rows, fill in (
        ([tree.tokens for tree in trees], 0),
        ([tree.parents for tree in trees], -1),
        ([tree.depths for tree in trees], 0),
    ):
        for row in rows:
            packed.extend(row)
            packed.extend([fill] * (width - len(row)))
    packed.extend([len(tree.tokens) for tree in trees])
    for tree in trees:
        for mask in tree.masks:
            packed.frombytes(mask.to_bytes(words * WORD_BYTES, "little"))
        packed.extend([0] * (words * (width - len(tree.masks))))
    for tree in trees:
        packed.frombytes(array("f", tree.logprobs).tobytes())
        packed.extend([0] * (width - len(tree.logprobs)))
    nodes = bs * width
    fields = (
        torch.frombuffer(packed, dtype=torch.int32)
        .to(device)
        .split_with_sizes([nodes, nodes, nodes, bs, nodes * words, nodes])
    )
    return DraftBatch(
        tokens=fields[0].view(bs, width),
        parents=fields[1].view(bs, width),
        depths=fields[2].view(bs, width),
        num_nodes=fields[3],
        ancestors=fields[4].view(bs, width, words),
        logprobs=fields[5].view(torch.float32).view(bs, width),
        draft_ms=draft_ms,
    )


def root_trees(root_tokens: Sequence[int], device: torch.device) -> DraftBatch:
    """Return trees of one node each. A round with such trees is a step of plain decoding."""
    bs = len(root_tokens)
    tokens = torch.tensor(root_tokens, dtype=torch.int32, device=device).view(bs, 1)
    return DraftBatch(
        tokens=tokens,
        parents=torch.full_like(tokens, -1),
        depths=torch.zeros_like(tokens),
        num_nodes=torch.ones(bs, dtype=torch.int32, device=device),
        ancestors=torch.ones((bs, 1, 1), dtype=torch.int32, device=device),
    )


def scatter_trees(
    parts: Sequence[tuple[DraftBatch, Sequence[int]]], root_tokens: Sequence[int]
) -> DraftBatch:
    """Merge batches of draft trees into one larger batch.

    Args:
        parts: At least one pair (batch, rows). Tree i of the batch becomes row ``rows[i]`` of the result.
        root_tokens: The root token of every row of the result. A row for which no part has a tree gets a tree
            of one node.

    Returns:
        The merged batch, on the device of the first part. All trees are padded to the size of the widest
        part. If the only part already contains all rows in order, that part is returned unchanged.
    """
    bs = len(root_tokens)
    first, rows = parts[0]
    if len(parts) == 1 and list(rows) == list(range(bs)):
        return first
    device = first.tokens.device
    width = max(trees.tokens.shape[1] for trees, _ in parts)
    tokens = torch.zeros((bs, width), dtype=torch.int32, device=device)
    tokens[:, 0] = torch.tensor(root_tokens, dtype=torch.int32, device=device)
    parents = torch.full((bs, width), -1, dtype=torch.int32, device=device)
    depths = torch.zeros((bs, width), dtype=torch.int32, device=device)
    num_nodes = torch.ones(bs, dtype=torch.int32, device=device)
    ancestors = torch.zeros((bs, width, mask_words(width)), dtype=torch.int32, device=device)
    ancestors[:, 0, 0] = 1
    logprobs = None
    if any(trees.logprobs is not None for trees, _ in parts):
        logprobs = torch.zeros((bs, width), device=device)
    for trees, rows in parts:
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        columns = trees.tokens.shape[1]
        tokens[index, :columns] = trees.tokens
        parents[index, :columns] = trees.parents
        depths[index, :columns] = trees.depths
        num_nodes[index] = trees.num_nodes
        ancestors[index, :columns, : trees.ancestors.shape[2]] = trees.ancestors
        if trees.logprobs is not None and logprobs is not None:
            logprobs[index, :columns] = trees.logprobs
    draft_ms = max(trees.draft_ms for trees, _ in parts)
    return DraftBatch(tokens, parents, depths, num_nodes, ancestors, logprobs=logprobs, draft_ms=draft_ms)
