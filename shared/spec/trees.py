"""Draft trees built on the host as Python numbers, and their conversion to a padded batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.shared.spec.tree import MASK_WORD_BITS, DraftBatch, mask_words

WORD = (1 << MASK_WORD_BITS) - 1


@dataclass(slots=True)
class HostTree:
    """One tree; node 0 is the root. Grow it with `add`, parents before children.

    Attributes:
        tokens, parents, depths, logprobs: One entry per node.
        masks: One entry per node: a bit for the node itself and each of its ancestors.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    logprobs: list[float] = field(default_factory=lambda: [0.0])
    masks: list[int] = field(default_factory=lambda: [1])

    @classmethod
    def of_root(cls, root_token: int) -> HostTree:
        """Return a tree of only a root."""
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


def pad_trees(trees: Sequence[HostTree], device: torch.device) -> DraftBatch:
    """Return the trees as one batch, each padded to the width of the largest."""
    width = max(len(tree.tokens) for tree in trees)
    words = mask_words(width)
    padding = [width - len(tree.tokens) for tree in trees]

    def columns(rows: Sequence[Sequence[float]], fill: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(
            [[*row, *[fill] * missing] for row, missing in zip(rows, padding, strict=True)], dtype=dtype
        ).to(device)

    masks = [
        [_words(mask, words) for mask in tree.masks] + [[0] * words] * missing
        for tree, missing in zip(trees, padding, strict=True)
    ]
    return DraftBatch(
        tokens=columns([tree.tokens for tree in trees], 0, torch.int32),
        parents=columns([tree.parents for tree in trees], -1, torch.int32),
        depths=columns([tree.depths for tree in trees], 0, torch.int32),
        num_nodes=torch.tensor([len(tree.tokens) for tree in trees], dtype=torch.int32).to(device),
        ancestors=torch.tensor(masks, dtype=torch.int32).to(device),
        logprobs=columns([tree.logprobs for tree in trees], 0, torch.float32),
    )


def _words(mask: int, words: int) -> list[int]:
    """Split a mask into signed 32-bit words, lowest first."""
    split = [mask >> MASK_WORD_BITS * word & WORD for word in range(words)]
    return [value - (1 << MASK_WORD_BITS) if value >> MASK_WORD_BITS - 1 else value for value in split]
