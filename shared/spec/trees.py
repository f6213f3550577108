"""Trees that are made on the host, as Python numbers, on their way to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.shared.spec.tree import MASK_WORD_BITS, DraftBatch, mask_words

WORD = (1 << MASK_WORD_BITS) - 1


@dataclass(slots=True)
class HostTree:
    """One tree; node 0 is the root. Grow it with `add`, parents first.

    Attributes:
        tokens, parents, depths, logprobs: Per node.
        masks: Per node: a bit for every ancestor and for the node itself.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    logprobs: list[float] = field(default_factory=lambda: [0.0])
    masks: list[int] = field(default_factory=lambda: [1])

    @classmethod
    def of_root(cls, root_token: int) -> HostTree:
        """Return the tree of a root alone."""
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
    """Return the trees as one batch, each padded to the largest."""
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
