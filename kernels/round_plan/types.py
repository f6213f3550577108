"""Layout of a drafting round's rows: which rows extend a sequence, and which belong to tree levels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoundPlan(NamedTuple):
    """Layout of the rows of a drafting round.

    The stable rows of a sequence are the draft's cached rows of committed tokens. A round extends them by R
    rows, followed by ``depth - 1`` tree levels of `topk` rows each.

    The tokens that the last round committed have fresh rows: the **last** c of the R rows. Causal attention
    then ends at the last stable row, and the state that the tree grows from is always in row R - 1. The rows
    before the fresh ones are padding, which stores nothing.

    Attributes:
        tokens: ``[bs * R] int32`` of the R rows of each sequence; padding 0.
        features: ``[bs * R] int32``, index of each row among the ``[bs * columns]`` fresh rows; for padding,
            the sequence's first.
        extend_slots: ``[bs * R] int64``; padding -1.
        level_slots: ``[depth - 1, bs * topk] int64``; -1 for idle sequences.
        positions: ``[bs * R + (depth - 1) * bs * topk] int32`` of all these rows in this order; padding >= 0.
        lens: ``[1 + depth, bs] int32``: stable rows before the extension, stable rows after it, then the
            number of tokens that each level sees.
        root_tokens: ``[bs] int32``.
        max_nodes: ``[bs] int32``; 1 for idle sequences.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    extend_slots: torch.Tensor
    level_slots: torch.Tensor
    positions: torch.Tensor
    lens: torch.Tensor
    root_tokens: torch.Tensor
    max_nodes: torch.Tensor
