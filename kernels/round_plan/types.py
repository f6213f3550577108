"""The data of a planned drafting round."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoundPlan(NamedTuple):
    """Where the rows of a drafting round lie: R rows per sequence that extend its stable ones, then ``depth - 1`` levels of `topk` rows.

    The c fresh rows of a sequence are the **last** c of its R, so that causal attention ends at its last stable row and the state that the
    tree grows from is always that of row R - 1; the rows before them are padding, which stores nothing.

    Attributes:
        tokens: ``[bs * R] int32`` of the rows that extend; padding 0.
        features: ``[bs * R] int32``, which of the ``[bs * columns]`` fresh rows each is; padding the sequence's first.
        extend_slots: ``[bs * R] int64``; padding -1.
        level_slots: ``[depth - 1, bs * topk] int64``; -1 in idle sequences.
        positions: ``[bs * R + (depth - 1) * bs * topk] int32``, of all these rows in that order; padding 0 or above.
        lens: ``[1 + depth, bs] int32``: stable rows before the extension, those behind it, then the tokens that each level sees up to.
        root_tokens: ``[bs] int32``.
        max_nodes: ``[bs] int32``; 1 in idle sequences.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    extend_slots: torch.Tensor
    level_slots: torch.Tensor
    positions: torch.Tensor
    lens: torch.Tensor
    root_tokens: torch.Tensor
    max_nodes: torch.Tensor
