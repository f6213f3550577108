"""Result type of tree_build: a batch of trees as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftTreeTensors:
    """Draft trees, one per sequence.

    Node 0 is the root, parents precede children, and columns past `num_nodes` are padding.

    Attributes:
        tokens: ``[bs, N] int32``, token of each node; 0 for padding.
        parents: ``[bs, N] int32``, node index; -1 for the root and padding.
        depths: ``[bs, N] int32``, 0 for the root and padding.
        num_nodes: ``[bs] int32``, the root included.
        ancestors: ``[bs, N, words] int32``, words = ceil(N / 32). Bit j of word w of a node is set if node
            ``32 * w + j`` is the node itself or one of its ancestors. Padding has no bits set.
        candidates: ``[bs, N] int32``, candidate index of each node; -1 for the root and padding.
        logprobs: ``[bs, N] fp32``, log-probs of the nodes; 0 for the root and padding. None if no log-probs
            were given.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor
    ancestors: torch.Tensor
    candidates: torch.Tensor
    logprobs: torch.Tensor | None = None
