"""packed_round: prepares and finishes rounds whose draft trees are stored in packed rows.

A slot contains the state of one decoding sequence. A round has a list of *entries*. Each entry names a slot
and the largest number of nodes of the entry's tree. The tree nodes of all entries form the packed rows, one
entry after the other.

An entry is live if it has rows, its slot has a token from the last round, and the slot has not reached its
limit. This token is the root of the next tree. Otherwise, the entry is idle, and nothing is stored or
accepted for it.

A round uses four ops:

1. `gather_group` copies the state of the slots that draft with one tree shape.
2. `pack_trees` copies the drafted trees to the packed rows.
3. `place_entries` adds the roots of the entries without a drafted tree, and locates every packed row in the
   KV cache.
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
    """Copy the state of a group's slots to the rows of `group`.

    A group consists of the slots that draft with the same tree shape.

    Args:
        state: State of all slots.
        features: ``[S, R, width]``, feature rows of the slots' last tokens.
        sampling: Sampling parameters of all slots.
        members: ``[G] int32``, the entry of each row of the group; -1 for an idle row.
        entries: The entries of the round.
        group: Receives the state. It has C columns, and C may be less than R. The caller ensures that no
            member has more than C tokens.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        Entry 0 is slot 1, which has two tokens. The second row of the group is idle.

        >>> import torch
        >>> from outrider.kernels.packed_round import Entries, GroupRows, SlotState, gather_group
        >>> from outrider.kernels.verify import SamplingTensors
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = SlotState(ints(4, 8), ints(9, 9), tokens=ints([5, 0], [6, 7]), counts=ints(1, 2))
        >>> sampling = SamplingTensors(
        ...     torch.tensor([0.0, 0.5]), ints(0, 0), torch.ones(2), torch.zeros(2), torch.tensor([3, 4]),
        ...     choices=ints(0, 1), all_greedy=False, any_filter=False,
        ... )
        >>> features = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
        >>> entries = Entries(slots=ints(1), starts=ints(0, 3), drafted=ints(1), captures=ints(1))
        >>> group = GroupRows(
        ...     ints(0, 0), ints(0, 0), ints([0, 0], [0, 0]), torch.zeros(2, 2, 1), torch.zeros(2),
        ...     torch.zeros(2, dtype=torch.int64), ints(0, 0),
        ... )
        >>> gather_group(state, features, sampling, ints(0, -1), entries, group)
        >>> group.tokens.tolist(), group.counts.tolist(), group.committed_lens.tolist()
        ([[6, 7], [0, 0]], [2, 0], [8, 1])
        >>> group.features[0].tolist(), group.seeds[0].item()
        ([[3.0], [4.0]], 4)
    """
    _expect_state(state)
    rows, columns = group.tokens.shape
    slots = state.counts.shape[0]
    expect("features", features, (slots, None, None))
    expect("members", members, (rows,), torch.int32)
    expect("entries.slots", entries.slots, (None,), torch.int32)
    expect("sampling.temperature", sampling.temperature, (slots,), torch.float32)
    expect("sampling.seeds", sampling.seeds, (slots,), torch.int64)
    expect("sampling.choices", sampling.choices, (slots,), torch.int32)
    expect("group.committed_lens", group.committed_lens, (rows,), torch.int32)
    expect("group.counts", group.counts, (rows,), torch.int32)
    expect("group.tokens", group.tokens, (rows, columns), torch.int32)
    expect_contiguous("group.tokens", group.tokens)
    expect("group.features", group.features, (rows, columns, features.shape[2]))
    expect("group.temperature", group.temperature, (rows,), torch.float32)
    expect("group.seeds", group.seeds, (rows,), torch.int64)
    expect("group.choices", group.choices, (rows,), torch.int32)
    if columns > state.tokens.shape[1]:
        raise ValueError(f"group.tokens has {columns} columns, but state.tokens only {state.tokens.shape[1]}")
    for name, tensor in (("features", features), ("group.features", group.features)):
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(f"the last dimension of {name} must be dense; its strides are {tensor.stride()}")
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
    """Copy the trees of a group (slots with the same tree shape) to the packed rows of their entries.

    If a tree has more nodes than its entry has rows, the tree is cut. Parents precede children, so a cut tree
    is valid.

    Args:
        tokens, parents, depths: ``[G, N] int32``, the trees, one per row of the group.
        ancestors: ``[G, N, words] int32``, ancestor masks of the nodes.
        num_nodes: ``[G] int32``, number of nodes of each tree.
        logprobs: ``[G, N] fp32``, or None for zeros.
        members: ``[G] int32``, the entry of each row; -1 for an idle row, which is skipped.
        entries: The entries of the round.
        trees: The packed trees, written in place.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        Entry 1 owns rows 1 and 2. Its tree has three nodes, so the tree is cut.

        >>> import torch
        >>> from outrider.kernels.packed_round import Entries, PackedTrees, pack_trees
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> entries = Entries(slots=ints(3, 0), starts=ints(0, 1, 3), drafted=ints(0, 1), captures=ints(0, 1))
        >>> trees = PackedTrees(
        ...     tokens=ints(0, 0, 0), parents=ints(0, 0, 0), depths=ints(0, 0, 0),
        ...     ancestors=ints([0], [0], [0]), logprobs=torch.zeros(3), num_nodes=ints(1, 1),
        ... )
        >>> pack_trees(
        ...     ints([5, 6, 7]), ints([-1, 0, 1]), ints([0, 1, 2]), ints([[1], [3], [7]]), ints(3), None,
        ...     ints(1), entries, trees,
        ... )
        >>> trees.tokens.tolist(), trees.parents.tolist(), trees.num_nodes.tolist()
        ([0, 5, 6], [0, -1, 0], [1, 2])
    """
    rows, nodes = tokens.shape
    expect("tokens", tokens, (rows, nodes), torch.int32)
    expect("parents", parents, (rows, nodes), torch.int32)
    expect("depths", depths, (rows, nodes), torch.int32)
    expect("ancestors", ancestors, (rows, nodes, None), torch.int32)
    expect("num_nodes", num_nodes, (rows,), torch.int32)
    if logprobs is not None:
        expect("logprobs", logprobs, (rows, nodes), torch.float32)
    expect("members", members, (rows,), torch.int32)
    _expect_trees(entries, trees)
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
    """Add the roots of entries without a drafted tree, and return the inputs of the verify pass.

    Args:
        state: State of all slots.
        entries: The E entries of the round.
        trees: The packed trees; roots of entries without a drafted tree are written in place.
        page_table: ``[S, pages] int32``, contiguous, with pages for all nodes of live entries.
        page_size: Tokens per page.
        sampling: Sampling parameters of all slots.

    Returns:
        The inputs of the verify pass.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        Slot 1 has a drafted tree: its root at token index 7 and a child. Slot 0 has only its root. The last
        row is padding. Pages have four tokens.

        >>> import torch
        >>> from outrider.kernels.packed_round import Entries, PackedTrees, SlotState, place_entries
        >>> from outrider.kernels.verify import SamplingTensors
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = SlotState(ints(4, 8), ints(9, 9), tokens=ints([5, 0], [6, 7]), counts=ints(1, 2))
        >>> entries = Entries(slots=ints(1, 0), starts=ints(0, 2, 3), drafted=ints(1, 0), captures=ints(0, 0))
        >>> trees = PackedTrees(
        ...     tokens=ints(7, 8, 0, 0), parents=ints(-1, 0, 0, 0), depths=ints(0, 1, 0, 0),
        ...     ancestors=ints([1], [3], [0], [0]), logprobs=torch.zeros(4), num_nodes=ints(2, 0),
        ... )
        >>> sampling = SamplingTensors(
        ...     torch.zeros(2), ints(0, 0), torch.ones(2), torch.zeros(2), torch.tensor([3, 4]), ints(0, 0),
        ...     all_greedy=True, any_filter=False,
        ... )
        >>> placed = place_entries(state, entries, trees, ints([6, 2, 0], [5, 1, 3]), 4, sampling)
        >>> placed.positions.tolist(), placed.kv_slots.tolist()
        ([7, 8, 3, 0], [7, 12, 27, -1])
        >>> placed.cached_lens.tolist(), placed.kv_lens.tolist(), placed.table_rows.tolist()
        ([7, 3], [9, 4], [1, 0])
        >>> trees.tokens.tolist(), trees.num_nodes.tolist()
        ([7, 8, 5, 0], [2, 1])
    """
    _expect_state(state)
    slots = state.counts.shape[0]
    _expect_trees(entries, trees)
    expect("sampling.temperature", sampling.temperature, (slots,), torch.float32)
    expect("sampling.top_k", sampling.top_k, (slots,), torch.int32)
    expect("sampling.top_p", sampling.top_p, (slots,), torch.float32)
    expect("sampling.min_p", sampling.min_p, (slots,), torch.float32)
    expect("sampling.seeds", sampling.seeds, (slots,), torch.int64)
    expect("sampling.choices", sampling.choices, (slots,), torch.int32)
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

    If several children of a node have the same token, the walk descends to the one with the lowest index. A
    path of more than R tokens is cut. Later rounds generate the tokens that were cut off, so the output does
    not change.

    Args:
        state: State of all slots; the tokens, counts and committed_lens of live entries are set in place. A
            slot whose last chosen token is negative becomes idle.
        entries: The entries of the round.
        trees: The packed trees.
        placed: The result of `place_entries`.
        chosen: ``[M] int64``, the token chosen after each row; -1 stops the walk.
        page_table: ``[S, pages] int32``, contiguous.
        page_size: Tokens per page.
        results: B, the number of entries to return results for. Entries from B on must be padding.

    Returns:
        The results of the round, in contiguous tensors.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong, or B exceeds the number of entries. The
            message names the tensor.

    Example:
        This continues the example of `place_entries`. In slot 1's tree, the root's child (token 8) is
        accepted, and 9 is the bonus token.

        >>> import torch
        >>> from outrider.kernels.packed_round import (
        ...     Entries, PackedTrees, SlotState, accept_entries, place_entries,
        ... )
        >>> from outrider.kernels.verify import SamplingTensors
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = SlotState(ints(4, 8), ints(9, 9), tokens=ints([5, 0], [6, 7]), counts=ints(1, 2))
        >>> entries = Entries(slots=ints(1, 0), starts=ints(0, 2, 3), drafted=ints(1, 0), captures=ints(1, 0))
        >>> trees = PackedTrees(
        ...     tokens=ints(7, 8, 0, 0), parents=ints(-1, 0, 0, 0), depths=ints(0, 1, 0, 0),
        ...     ancestors=ints([1], [3], [0], [0]), logprobs=torch.zeros(4), num_nodes=ints(2, 0),
        ... )
        >>> sampling = SamplingTensors(
        ...     torch.zeros(2), ints(0, 0), torch.ones(2), torch.zeros(2), torch.tensor([3, 4]), ints(0, 0),
        ...     all_greedy=True, any_filter=False,
        ... )
        >>> table = ints([6, 2, 0], [5, 1, 3])
        >>> placed = place_entries(state, entries, trees, table, 4, sampling)
        >>> chosen = torch.tensor([8, 9, 4, 0])
        >>> accepted = accept_entries(state, entries, trees, placed, chosen, table, 4, results=2)
        >>> accepted.packed.tolist()  # accepted drafts, nodes, path, emitted
        [[1, 2, 0, 1, 8, 9], [0, 1, 0, -1, 4, -1]]
        >>> accepted.feature_slots.tolist(), accepted.feature_places.tolist()
        ([7, 12, -1, -1], [2, 3, -1, -1])
        >>> state.tokens.tolist(), state.counts.tolist(), state.committed_lens.tolist()
        ([[4, 0], [8, 9]], [1, 2], [5, 10])
    """
    _expect_state(state)
    _expect_trees(entries, trees)
    expect("chosen", chosen, (trees.tokens.shape[0],), torch.int64)
    if not 0 <= results <= entries.slots.shape[0]:
        raise ValueError(f"results is {results}, but there are {entries.slots.shape[0]} entries")
    expect("page_table", page_table, (state.counts.shape[0], None), torch.int32)
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


def _expect_trees(entries: Entries, trees: PackedTrees) -> None:
    count, rows = entries.slots.shape[0], trees.tokens.shape[0]
    expect("entries.slots", entries.slots, (count,), torch.int32)
    expect("entries.starts", entries.starts, (count + 1,), torch.int32)
    expect("entries.drafted", entries.drafted, (count,), torch.int32)
    expect("entries.captures", entries.captures, (count,), torch.int32)
    expect("trees.tokens", trees.tokens, (rows,), torch.int32)
    expect("trees.parents", trees.parents, (rows,), torch.int32)
    expect("trees.depths", trees.depths, (rows,), torch.int32)
    expect("trees.ancestors", trees.ancestors, (rows, None), torch.int32)
    expect("trees.logprobs", trees.logprobs, (rows,), torch.float32)
    expect("trees.num_nodes", trees.num_nodes, (count,), torch.int32)
    expect_contiguous("trees.ancestors", trees.ancestors)
