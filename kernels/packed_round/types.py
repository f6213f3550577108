"""Data types of packed_round: per-slot state, the entries of a round, packed trees, and results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.verify.types import SamplingTensors


@dataclass(frozen=True, slots=True)
class SlotState:
    """State that each slot keeps from one round to the next. A slot belongs to one decoding sequence.

    Attributes:
        committed_lens: ``[S] int32``, number of committed tokens, the root included.
        limits: ``[S] int32``; a slot takes part while its committed_len is below its limit.
        tokens: ``[S, R] int32``, contiguous; the tokens that the last round chose for the slot, padded
            with 0.
        counts: ``[S] int32``, number of tokens that the last round chose for the slot; 0 for an idle slot.
    """

    committed_lens: torch.Tensor
    limits: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a round: one for each sequence, then padding.

    Attributes:
        slots: ``[E] int32``, the slot of each entry; -1 for padding.
        starts: ``[E + 1] int32``, ascending. Entry e owns the packed rows ``[starts[e], starts[e + 1])``.
        drafted: ``[E] int32``, 1 if `pack_trees` writes the entry's tree, 0 if the tree has only a root.
        captures: ``[E] int32``, 1 if the feature rows of the entry's accepted nodes are stored.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    drafted: torch.Tensor
    captures: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """The draft trees of a round in packed rows. Node n of entry e is row ``starts[e] + n``.

    Attributes:
        tokens: ``[M] int32``.
        parents: ``[M] int32``, index of the parent within the entry's tree; -1 for a root.
        depths: ``[M] int32``.
        ancestors: ``[M, words] int32``, ancestor masks over the nodes of the entry's tree.
        logprobs: ``[M] fp32``, the draft's log-probability of each node, for traces.
        num_nodes: ``[E] int32``, number of nodes of each entry's tree, at most the entry's rows.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    logprobs: torch.Tensor
    num_nodes: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlacedEntries:
    """Inputs of the verify pass, as returned by `place_entries`. E is the number of entries.

    Attributes:
        cached_lens: ``[E] int32``; ``committed_len - 1``, 0 for an idle entry.
        kv_lens: ``[E] int32``; ``cached_len + num_nodes``, 0 for an idle entry.
        table_rows: ``[E] int32``, the entry's row of the page table; -1 for an idle entry.
        positions: ``[M] int64``; ``cached_len + depth``, 0 for padding.
        next_positions: ``[M] int64``; ``positions + 1``, the index of the token chosen after the node.
        kv_slots: ``[M] int64``, KV slot of each row; -1 for padding and idle entries.
        sampling: Sampling parameters of each row, ``[M]``. Padding and idle entries have neutral parameters
            (greedy, without filters).
    """

    cached_lens: torch.Tensor
    kv_lens: torch.Tensor
    table_rows: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    kv_slots: torch.Tensor
    sampling: SamplingTensors


@dataclass(frozen=True, slots=True)
class AcceptedEntries:
    """Results of a round, as returned by `accept_entries`, for the first B entries.

    Attributes:
        path: ``[B, R] int32``, node indices of the root and the accepted drafts, padded with -1.
        num_accepted: ``[B] int32``, at most R - 1; -1 for an idle entry.
        packed: ``[B, 2 + 2 R] int32``, a row per entry: num_accepted, num_nodes, path, emitted tokens. Path
            and emitted tokens are padded with -1.
        feature_rows: ``[M] int64``. Element ``starts[e] + c`` is the packed row of the node in column c of
            entry e's path. Past the end of the path, it is any valid row.
        feature_slots: ``[M] int64``, KV slot of each row in `feature_rows`. The slot is -1 past the end of a
            path, for padding, and for entries that store no features.
        feature_places: ``[M] int64``, destination of each row in `feature_rows`, as an index into the slots'
            features viewed as ``[S * R]`` rows. It is -1 where `feature_slots` is -1.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    packed: torch.Tensor
    feature_rows: torch.Tensor
    feature_slots: torch.Tensor
    feature_places: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupRows:
    """State of a group of slots, one row per member, as written by `gather_group`.

    Attributes:
        committed_lens: ``[G] int32``, number of committed tokens, the root included; 1 for an idle row.
        counts: ``[G] int32``, number of tokens that the last round chose; 0 for an idle row.
        tokens: ``[G, C] int32``, the tokens that the last round chose.
        features: ``[G, C, width]``, feature rows of these tokens. The width is 0 if there are no features.
        temperature, seeds, choices: ``[G]`` fp32, int64 and int32, sampling parameters.
    """

    committed_lens: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
