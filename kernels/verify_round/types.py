"""Data types of verify_round: a round's state, the locations of its nodes, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_PARTS = 4
"""Largest number of tensors that one `post_parts` posts."""


@dataclass(frozen=True, slots=True)
class RoundTensors:
    """State that one round leaves for the next.

    Attributes:
        committed_lens: ``[bs] int32``, number of committed tokens, the root included.
        tokens: ``[bs, R] int32``, contiguous; tokens chosen in the last round, padded with 0.
        counts: ``[bs] int32``, number of tokens chosen in the last round; 0 for idle rows.
    """

    committed_lens: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Locations of the nodes of a round.

    Attributes:
        cached_lens: ``[bs] int32``; ``committed_len - 1``, 0 for idle rows.
        kv_lens: ``[bs] int32``; ``cached_lens + num_nodes``.
        positions: ``[bs * N] int64``; ``cached_lens + depth``.
        next_positions: ``[bs * N] int64``; ``positions + 1``, the index of the token chosen after the node.
        slots: ``[bs * N] int64``; -1 for padding and idle rows.
    """

    cached_lens: torch.Tensor
    kv_lens: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class AcceptedRound:
    """Result of a round; C = min(N, R).

    Attributes:
        path: ``[bs, N] int32``, node indices of the root and the accepted drafts, padded with -1, as from
            `verify_tree`.
        num_accepted: ``[bs] int32``, at most R - 1; -1 for idle rows.
        packed: ``[bs, 2 + 2 R] int32``: num_accepted, num_nodes, path, emitted; path and emitted padded with
            -1.
        feature_rows: ``[bs * C] int64``, row of the pass that contains column c of the path. Past the path,
            the row of the sequence's root.
        feature_slots: ``[bs * C] int64``, slot of the feature row of column c; -1 past the path and for idle
            rows.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    packed: torch.Tensor
    feature_rows: torch.Tensor
    feature_slots: torch.Tensor
