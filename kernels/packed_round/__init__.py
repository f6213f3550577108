"""packed_round: rounds over slots, whose trees lie one behind the other in packed rows.

A slot holds the state of one decoding sequence, and never moves while the sequence decodes. A round takes a
list of slots (its *entries*), each with an upper bound of nodes, and computes the nodes of all entries as
packed rows. An entry takes part if its slot has a token and has not reached its limit. Other entries are
idle: nothing is stored or accepted for them.

1. `gather_group` copies the state of the slots that draft with one tree shape.
2. `pack_trees` places the drafted trees in the packed rows.
3. `place_entries` adds the roots of all other entries and locates every row.
4. `accept_entries` walks the trees after the verify pass, and updates the slots.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.packed_round import reference
from outrider.kernels.packed_round.types import (
    AcceptedEntries,
    Entries,
    GroupRows,
    PackedTrees,
    PlacedEntries,
    SlotState,
)
from outrider.kernels.verify.types import SamplingTensors

__all__ = [
    "AcceptedEntries",
    "Entries",
    "GroupRows",
    "PackedTrees",
    "PlacedEntries",
    "SlotState",
    "accept_entries",
    "gather_group",
    "pack_trees",
    "place_entries",
]


def gather_group(
    state: SlotState,
    features: torch.Tensor,
    sampling: SamplingTensors,
    members: torch.Tensor,
    entries: Entries,
    group: GroupRows,
) -> None:
    """Copy the state of a group's slots to the rows of `group`, in place.

    Args:
        state: State of all slots.
        features: ``[S, R, width]``, feature rows of the slots' last tokens.
        sampling: Sampling parameters of all slots.
        members: ``[G] int32``, the entry of each row of the group; -1 for an idle row.
        entries: The entries of the round.
        group: Receives the rows. Its columns C may be fewer than R. The caller ensures that no member has
            more than C tokens.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.
    """
    _expect_state(state)
    rows, columns = group.tokens.shape
    expect("members", members, (rows,), torch.int32)
    expect("group.counts", group.counts, (rows,), torch.int32)
    if use_triton(members):
        from outrider.kernels.packed_round import triton as compiled

        compiled.gather_group(state, features, sampling, members, entries, group)
        return
    reference.gather_group(state, features, sampling, members, entries, group)


def pack_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    logprobs: torch.Tensor | None,
    members: torch.Tensor,
    entries: Entries,
    trees: PackedTrees,
) -> None:
    """Write the trees of a group to the packed rows of their entries, in place.

    A tree with more nodes than its entry has rows is cut. Parents precede children, so a cut tree is valid.

    Args:
        tokens, parents, depths: ``[G, N] int32``, the trees, one per row of the group.
        ancestors: ``[G, N, words] int32``.
        num_nodes: ``[G] int32``.
        logprobs: ``[G, N] fp32``, or None for zeros.
        members: ``[G] int32``, the entry of each row; -1 for an idle row, which is skipped.
        entries: The entries of the round.
        trees: Receives the trees.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.
    """
    rows, nodes = tokens.shape
    expect("tokens", tokens, (rows, nodes), torch.int32)
    expect("parents", parents, (rows, nodes), torch.int32)
    expect("depths", depths, (rows, nodes), torch.int32)
    expect("ancestors", ancestors, (rows, nodes, None), torch.int32)
    expect("num_nodes", num_nodes, (rows,), torch.int32)
    expect("members", members, (rows,), torch.int32)
    arguments = (tokens, parents, depths, ancestors, num_nodes, logprobs, members, entries, trees)
    if use_triton(tokens):
        from outrider.kernels.packed_round import triton as compiled

        compiled.pack_trees(*arguments)
        return
    reference.pack_trees(*arguments)


def place_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    page_table: torch.Tensor,
    page_size: int,
    sampling: SamplingTensors,
) -> PlacedEntries:
    """Add the roots of entries without a drafted tree, and return the locations of all packed rows.

    Args:
        state: State of all slots.
        entries: The entries of the round; E entries.
        trees: The packed trees; roots of entries without a drafted tree are written in place.
        page_table: ``[S, pages] int32``, contiguous, with pages for all nodes of live entries.
        page_size: Tokens per page.
        sampling: Sampling parameters of all slots.

    Returns:
        The inputs of the verify pass.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.
    """
    _expect_state(state)
    count, rows = entries.slots.shape[0], trees.tokens.shape[0]
    expect("entries.slots", entries.slots, (count,), torch.int32)
    expect("entries.starts", entries.starts, (count + 1,), torch.int32)
    expect("entries.drafted", entries.drafted, (count,), torch.int32)
    expect("trees.parents", trees.parents, (rows,), torch.int32)
    expect("trees.depths", trees.depths, (rows,), torch.int32)
    expect("trees.num_nodes", trees.num_nodes, (count,), torch.int32)
    expect("page_table", page_table, (state.counts.shape[0], None), torch.int32)
    expect_contiguous("page_table", page_table)
    if use_triton(page_table):
        from outrider.kernels.packed_round import triton as compiled

        return compiled.place_entries(state, entries, trees, page_table, page_size, sampling)
    return reference.place_entries(state, entries, trees, page_table, page_size, sampling)


def accept_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    placed: PlacedEntries,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    results: int,
) -> AcceptedEntries:
    """Walk the tree of every entry, and prepare the results for the host and for the next round.

    Among siblings with the same token, the walk descends to the lowest index. A path of more than R tokens is
    cut. The rest is generated in later rounds, so the output does not change.

    Args:
        state: State of all slots; the tokens, counts and committed_lens of live entries are set in place. A
            slot whose last chosen token is negative becomes idle.
        entries: The entries of the round.
        trees: The packed trees.
        placed: The result of `place_entries`.
        chosen: ``[M] int64``, the token chosen after each row; -1 stops the walk.
        page_table: ``[S, pages] int32``, contiguous.
        page_size: Tokens per page.
        results: B, the number of leading entries that may be real.

    Returns:
        The tensors, contiguous.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.
    """
    _expect_state(state)
    expect("chosen", chosen, (trees.tokens.shape[0],), torch.int64)
    expect("entries.captures", entries.captures, (entries.slots.shape[0],), torch.int32)
    expect_contiguous("page_table", page_table)
    arguments = (state, entries, trees, placed, chosen, page_table, page_size, results)
    if use_triton(chosen):
        from outrider.kernels.packed_round import triton as compiled

        return compiled.accept_entries(*arguments)
    return reference.accept_entries(*arguments)


def _expect_state(state: SlotState) -> None:
    slots = state.counts.shape[0]
    expect("state.committed_lens", state.committed_lens, (slots,), torch.int32)
    expect("state.limits", state.limits, (slots,), torch.int32)
    expect("state.tokens", state.tokens, (slots, None), torch.int32)
    expect("state.counts", state.counts, (slots,), torch.int32)
    expect_contiguous("state.tokens", state.tokens)
