"""Layout of a drafting pass's rows: which rows extend a sequence, and which belong to tree levels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowPlan(NamedTuple):
    """Layout of the rows of a drafting pass in the draft's KV cache.

    The *stable* rows of a sequence are the draft's cached rows of committed tokens. A pass adds R rows
    behind them, and then ``depth - 1`` tree levels of `topk` rows each.

    The last round committed c tokens, which have no stable rows yet. Their rows are the *fresh* rows, the
    **last** c of the R rows. The rows before them are padding, and nothing is stored for them. With this
    order, the hidden state from which the tree grows is always in row R - 1.

    Attributes:
        tokens: ``[bs * R] int32``, tokens of the R rows of each sequence; 0 for padding.
        features: ``[bs * R] int32``, index of each row's feature among the features ``[bs * columns]`` of the
            fresh tokens. Padding has the index of its sequence's first fresh token.
        extend_slots: ``[bs * R] int64``, KV slots of the R rows of each sequence; -1 for padding and for rows
            before position 0.
        level_slots: ``[depth - 1, bs * topk] int64``, KV slots of the tree levels' rows; -1 for idle
            sequences.
        positions: ``[bs * R + (depth - 1) * bs * topk] int32``, positions of the R rows of each sequence,
            then positions of the levels' rows. Positions of padding are at least 0.
        lens: ``[1 + depth, bs] int32``: the number of stable rows without the fresh rows, then the number
            with them, then the number of tokens that each level sees.
        root_tokens: ``[bs] int32``, token of each tree's root.
        max_nodes: ``[bs] int32``, largest number of nodes of each tree; 1 for idle sequences.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    extend_slots: torch.Tensor
    level_slots: torch.Tensor
    positions: torch.Tensor
    lens: torch.Tensor
    root_tokens: torch.Tensor
    max_nodes: torch.Tensor
