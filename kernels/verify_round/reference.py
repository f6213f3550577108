"""Torch reference of verify_round. The package documents the contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from outrider.kernels.verify.reference import verify_tree
from outrider.kernels.verify_round.types import AcceptedRound, PlacedRows, RoundTensors


def begin_round(state: RoundTensors, limits: torch.Tensor) -> torch.Tensor:
    state.counts.mul_(state.committed_lens < limits)
    last = (state.counts.long() - 1).clamp_(min=0)[:, None]
    return torch.where(state.counts[:, None] > 0, state.tokens.gather(1, last), 0)


def place_rows(
    live: torch.Tensor,
    committed_lens: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> PlacedRows:
    cached = torch.where(live > 0, committed_lens - 1, 0)
    node = torch.arange(depths.shape[1], dtype=torch.int32, device=depths.device)
    real = (live[:, None] > 0) & (node < num_nodes[:, None])
    positions = (cached[:, None] + depths).flatten().long()
    slots = torch.where(real, _slots(page_table, cached[:, None] + node, page_size), -1)
    return PlacedRows(cached, cached + num_nodes, positions, positions + 1, slots.flatten())


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
    bs, nodes = tokens.shape
    # 1. Walk the trees; a root alone needs no walk.
    if nodes == 1:
        path, emitted, num_accepted = (
            torch.zeros_like(tokens),
            chosen.to(torch.int32),
            torch.zeros_like(num_nodes),
        )
    else:
        tree = verify_tree(tokens, parents, num_nodes, chosen)
        path, emitted, num_accepted = tree.path, tree.emitted, tree.num_accepted
    # 2. Cut to R columns, and pack for the host.
    accepted = torch.where(live > 0, num_accepted.clamp(max=columns - 1), -1)
    column = torch.arange(columns, dtype=torch.int32, device=path.device)
    on_path = column <= accepted[:, None]  # [bs, R]
    walked = torch.where(on_path, _fit(path, columns), -1)
    said = torch.where(on_path, _fit(emitted, columns), -1)
    packed = torch.cat((accepted[:, None], num_nodes[:, None], walked, said), dim=1)
    # 3. Locate the feature rows of the path.
    kept = min(nodes, columns)
    first = torch.arange(0, bs * nodes, nodes, device=path.device)[:, None]
    rows = first + walked[:, :kept].clamp(min=0)
    slots = torch.where(
        on_path[:, :kept], _slots(page_table, cached_lens[:, None] + column[:kept], page_size), -1
    )
    # 4. Prepare the next round.
    if state is not None:
        bonus = said.gather(1, accepted.clamp(min=0).long()[:, None])[:, 0]
        counts = torch.where(bonus >= 0, accepted + 1, 0)
        state.tokens.copy_(torch.where(column < counts[:, None], said, 0))
        state.committed_lens.add_(counts)
        state.counts.copy_(counts)
    return AcceptedRound(path, accepted, packed, rows.flatten(), slots.flatten())


def _slots(page_table: torch.Tensor, index: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots ``[bs, n] int64`` of token indices ``[bs, n]``; arbitrary past the table."""
    pages = page_table.gather(1, (index // page_size).clamp(max=page_table.shape[1] - 1).long())
    return pages.long() * page_size + index % page_size


def _fit(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Cut ``[bs, n]`` to `columns` columns, or pad it with -1."""
    missing = columns - tensor.shape[1]
    return pad(tensor, (0, missing), value=-1) if missing > 0 else tensor[:, :columns]


def post_round(packed: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    place = int(turn)
    ring[place] = packed
    turn.fill_((place + 1) % ring.shape[0])


def post_parts(parts: Sequence[torch.Tensor], ring: torch.Tensor, turn: torch.Tensor) -> None:
    place, words = int(turn), torch.cat([part.flatten() for part in parts])
    ring[place, : words.shape[0]] = words
    turn.fill_((place + 1) % ring.shape[0])
