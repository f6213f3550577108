"""verify_round: the steps around the target's verify pass, each in one launch: place nodes, accept, report.

A row is *live* while its entry of `live` is above 0. Other rows are idle: nothing is stored or accepted for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.verify_round import reference
from outrider.kernels.verify_round.types import MOST_PARTS, AcceptedRound, PlacedRows, RoundTensors

__all__ = [
    "MOST_PARTS",
    "AcceptedRound",
    "PlacedRows",
    "RoundTensors",
    "accept_round",
    "begin_round",
    "place_rows",
    "post_parts",
    "post_round",
]


def begin_round(state: RoundTensors, limits: torch.Tensor) -> torch.Tensor:
    """Set the count of each row that reached its limit to 0, in place, and return every row's last token.

    Args:
        state: State left by the last round; `counts` is changed.
        limits: ``[bs] int32``; a row continues while its committed_len is below its limit.

    Returns:
        ``[bs, 1] int32``, ``tokens[b, counts[b] - 1]``; 0 for idle rows.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        The second row has reached its limit of 9 tokens and becomes idle.

        >>> import torch
        >>> from outrider.kernels.verify_round import RoundTensors, begin_round
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = RoundTensors(committed_lens=ints(8, 9), tokens=ints([5, 6], [7, 8]), counts=ints(2, 1))
        >>> begin_round(state, ints(9, 9)).tolist()
        [[6], [0]]
        >>> state.counts.tolist()
        [2, 0]
    """
    _expect_state(state)
    expect("limits", limits, (state.counts.shape[0],), torch.int32)
    if use_triton(limits):
        from outrider.kernels.verify_round import triton as compiled

        return compiled.begin_round(state, limits)
    return reference.begin_round(state, limits)


def place_rows(
    live: torch.Tensor,
    committed_lens: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> PlacedRows:
    """Return the locations of every tree's nodes: positions, slots, and the lengths that attention needs.

    Args:
        live: ``[bs] int32``, above 0 for live rows.
        committed_lens: ``[bs] int32``, the root included; node n has token index ``committed_len - 1 + n``.
        depths: ``[bs, N] int32``.
        num_nodes: ``[bs] int32``, number of nodes of each tree. Further columns are padding.
        page_table: ``[bs, pages] int32``, contiguous, with pages for all nodes of live rows.
        page_size: Tokens per page.

    Returns:
        The tensors, contiguous. An idle row counts as a sequence without cached tokens.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        A root at token index 3 with two children, on pages 6 and 2 of four tokens each.

        >>> import torch
        >>> from outrider.kernels.verify_round import place_rows
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> placed = place_rows(ints(1), ints(4), ints([0, 1, 1, 0]), ints(3), ints([6, 2]), 4)
        >>> placed.positions.tolist(), placed.slots.tolist()
        ([3, 4, 4, 3], [27, 8, 9, -1])
        >>> placed.cached_lens.tolist(), placed.kv_lens.tolist()
        ([3], [6])
    """
    bs, nodes = depths.shape
    expect("live", live, (bs,), torch.int32)
    expect("committed_lens", committed_lens, (bs,), torch.int32)
    expect("depths", depths, (bs, nodes), torch.int32)
    expect("num_nodes", num_nodes, (bs,), torch.int32)
    expect("page_table", page_table, (bs, None), torch.int32)
    expect_contiguous("page_table", page_table)
    if use_triton(depths):
        from outrider.kernels.verify_round import triton as compiled

        return compiled.place_rows(live, committed_lens, depths, num_nodes, page_table, page_size)
    return reference.place_rows(live, committed_lens, depths, num_nodes, page_table, page_size)


def accept_round(
    live: torch.Tensor,
    cached_lens: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    columns: int,
    state: RoundTensors | None,
) -> AcceptedRound:
    """Walk every row's tree as `verify_tree` does, and prepare the results for the host and the next round.

    Args:
        live: ``[bs] int32``, above 0 for live rows; may be ``state.counts``.
        cached_lens: ``[bs] int32``, from `place_rows`.
        tokens: ``[bs, N] int32``, tokens of the trees.
        parents: ``[bs, N] int32``, parents of the trees.
        num_nodes: ``[bs] int32``, sizes of the trees.
        chosen: ``[bs, N] int64``, the token chosen after each node; -1 stops the walk.
        page_table: ``[bs, pages] int32``, contiguous.
        page_size: Tokens per page.
        columns: R, the largest number of tokens that a row emits. A row accepts at most R - 1 drafts.
        state: State for the next round, of width R, or None. Its tokens, counts and committed_lens are set in
            place from this round's choice. A row whose bonus token is negative becomes idle and emits no
            tokens into `state`.

    Returns:
        The tensors, contiguous.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        The tree of `place_rows`: node 2 (token 7) is accepted, and 8 is the bonus token.

        >>> import torch
        >>> from outrider.kernels.verify_round import RoundTensors, accept_round
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = RoundTensors(committed_lens=ints(4), tokens=ints([5, 0, 0]), counts=ints(1))
        >>> accepted = accept_round(
        ...     state.counts, ints(3), ints([5, 6, 7]), ints([-1, 0, 0]), ints(3), torch.tensor([[7, 9, 8]]),
        ...     ints([6, 2]), 4, 3, state,
        ... )
        >>> accepted.path.tolist(), accepted.num_accepted.tolist()
        ([[0, 2, -1]], [1])
        >>> accepted.packed.tolist()  # accepted drafts, nodes, path, emitted
        [[1, 3, 0, 2, -1, 7, 8, -1]]
        >>> accepted.feature_rows.tolist(), accepted.feature_slots.tolist()
        ([0, 2, 0], [27, 8, -1])
        >>> state.tokens.tolist(), state.counts.tolist(), state.committed_lens.tolist()
        ([[7, 8, 0]], [2], [6])
    """
    bs, nodes = tokens.shape
    expect("live", live, (bs,), torch.int32)
    expect("cached_lens", cached_lens, (bs,), torch.int32)
    expect("tokens", tokens, (bs, nodes), torch.int32)
    expect("parents", parents, (bs, nodes), torch.int32)
    expect("num_nodes", num_nodes, (bs,), torch.int32)
    expect("chosen", chosen, (bs, nodes), torch.int64)
    expect("page_table", page_table, (bs, None), torch.int32)
    expect_contiguous("page_table", page_table)
    if state is not None:
        _expect_state(state)
        expect("state.tokens", state.tokens, (bs, columns), torch.int32)
    arguments = (live, cached_lens, tokens, parents, num_nodes, chosen, page_table, page_size, columns, state)
    if use_triton(tokens):
        from outrider.kernels.verify_round import triton as compiled

        return compiled.accept_round(*arguments)
    return reference.accept_round(*arguments)


def post_round(packed: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Write a round's result to the next entry of a ring, which the host reads without a further copy.

    Args:
        packed: ``[bs, C] int32``, contiguous.
        ring: ``[K, bs, C] int32``, contiguous; in pinned host memory if `packed` is on a GPU.
        turn: ``[1] int32`` on the device of `packed`: the entry to write, 0 to K - 1. The op advances `turn`
            by one, modulo K.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.verify_round import post_round
        >>> ring, turn = torch.zeros(2, 1, 3, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        >>> post_round(torch.tensor([[4, 5, 6]], dtype=torch.int32), ring, turn)
        >>> ring.tolist(), turn.tolist()
        ([[[0, 0, 0]], [[4, 5, 6]]], [0])
    """
    bs, columns = packed.shape
    expect("packed", packed, (bs, columns), torch.int32)
    expect("ring", ring, (None, bs, columns), torch.int32)
    expect("turn", turn, (1,), torch.int32)
    expect_contiguous("packed", packed)
    expect_contiguous("ring", ring)
    if use_triton(packed):
        from outrider.kernels.verify_round import triton as compiled

        compiled.post_round(packed, ring, turn)
        return
    reference.post_round(packed, ring, turn)


def post_parts(parts: Sequence[torch.Tensor], ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Write tensors one behind the other to the next entry of a ring, like `post_round`, in one launch.

    Args:
        parts: One to `MOST_PARTS` int32 tensors, contiguous, of any shape. View fp32 tensors as int32.
        ring: ``[K, C] int32``, contiguous; in pinned host memory if the parts are on a GPU. C is at least the
            number of all parts' elements. Further columns are not changed.
        turn: ``[1] int32`` on the device of the parts: the entry to write. The op advances `turn` by one,
            modulo K.

    Raises:
        ValueError: The number of parts is wrong, they do not fit into C columns, or a tensor's dtype or
            layout is wrong.

    Example:
        >>> import torch
        >>> from outrider.kernels.verify_round import post_parts
        >>> ring, turn = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        >>> packed, score = torch.tensor([[4, 5]], dtype=torch.int32), torch.tensor([0.5])
        >>> post_parts([packed, score.view(torch.int32)], ring, turn)
        >>> ring[1, :2].tolist(), ring[1, 2:3].view(torch.float32).tolist(), turn.tolist()
        ([4, 5], [0.5], [0])
    """
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"parts has {len(parts)} tensors, expected 1 to {MOST_PARTS}")
    for index, part in enumerate(parts):
        expect(f"parts[{index}]", part, tuple(part.shape), torch.int32)
        expect_contiguous(f"parts[{index}]", part)
    expect("ring", ring, (None, None), torch.int32)
    expect("turn", turn, (1,), torch.int32)
    expect_contiguous("ring", ring)
    words = sum(part.numel() for part in parts)
    if words > ring.shape[1]:
        raise ValueError(f"parts has {words} elements, but an entry of ring has {ring.shape[1]}")
    if use_triton(turn):
        from outrider.kernels.verify_round import triton as compiled

        compiled.post_parts(parts, ring, turn)
        return
    reference.post_parts(parts, ring, turn)


def _expect_state(state: RoundTensors) -> None:
    bs = state.counts.shape[0]
    expect("state.committed_lens", state.committed_lens, (bs,), torch.int32)
    expect("state.tokens", state.tokens, (bs, None), torch.int32)
    expect("state.counts", state.counts, (bs,), torch.int32)
    expect_contiguous("state.tokens", state.tokens)
