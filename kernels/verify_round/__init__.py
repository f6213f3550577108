"""verify_round: the small work before and after the target's pass of a round, each part one launch, nothing asked of the host.

A row is *live* while its entry of `live` is above 0; other rows are idle: nothing is stored or accepted for them.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.verify_round import reference
from outrider.kernels.verify_round.types import AcceptedRound, PlacedRows, RoundTensors

__all__ = [
    "AcceptedRound",
    "PlacedRows",
    "RoundTensors",
    "accept_round",
    "begin_round",
    "place_rows",
    "post_round",
]


def begin_round(state: RoundTensors, limits: torch.Tensor) -> torch.Tensor:
    """Set the counts of rows to 0 that reached their limit, in place, and return every row's last token.

    Args:
        state: What the last round left; `counts` is changed.
        limits: ``[bs] int32``; a row goes on while its committed_len is below.

    Returns:
        ``[bs, 1] int32``, ``tokens[b, counts[b] - 1]``; 0 for idle rows.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
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
    """Say where the nodes of every row's tree are: positions, slots, and the lengths that attention needs.

    Args:
        live: ``[bs] int32``.
        committed_lens: ``[bs] int32``, the root included; node n takes token index ``committed_len - 1 + n``.
        depths: ``[bs, N] int32``.
        num_nodes: ``[bs] int32``; columns past it are padding.
        page_table: ``[bs, pages] int32``, contiguous; holds all nodes of live rows.
        page_size: Tokens of a page.

    Returns:
        The tensors, contiguous. An idle row counts as a sequence without cached tokens.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
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
    """Walk every row's tree as `verify_tree` does, and sum up the round for the host, for the feature rows, and for the next round.

    Args:
        live: ``[bs] int32``; may be ``state.counts``.
        cached_lens: ``[bs] int32``, of `place_rows`.
        tokens, parents, num_nodes: The trees, ``[bs, N]``, ``[bs, N]``, ``[bs] int32``.
        chosen: ``[bs, N] int64``, the token chosen after each node; -1 stops the walk.
        page_table: ``[bs, pages] int32``, contiguous.
        page_size: Tokens of a page.
        columns: R; a row accepts at most R - 1 drafts, what it emits is cut there.
        state: Where the next round starts from, changed in place: tokens, counts and committed_lens of what this one chose. A row whose
            bonus token is negative goes idle and emits nothing into it. None leaves that out. Its width is R.

    Returns:
        The tensors, contiguous.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
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
    """Write what a round chose into the next place of a ring that the host reads, as part of the round: no copy has to follow it.

    Args:
        packed: ``[bs, C] int32``, contiguous.
        ring: ``[K, bs, C] int32``, contiguous; in pinned memory of the host where `packed` is on a GPU.
        turn: ``[1] int32``, beside `packed`: the place, 0 to K - 1; becomes the one behind it, or 0.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
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


def _expect_state(state: RoundTensors) -> None:
    bs = state.counts.shape[0]
    expect("state.committed_lens", state.committed_lens, (bs,), torch.int32)
    expect("state.tokens", state.tokens, (bs, None), torch.int32)
    expect("state.counts", state.counts, (bs,), torch.int32)
    expect_contiguous("state.tokens", state.tokens)
