"""verify_round in Triton: one program per sequence; the contract is in the package's docstring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch
from outrider.kernels.verify_round.types import PlacedRows, RoundTensors, SettledRound


@triton.jit
def _begin(counts, committed_lens, tokens, token_stride, limits, roots):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    count = tl.where(tl.load(committed_lens + row) < tl.load(limits + row), count, 0)
    root = tl.load(tokens + row * token_stride + count - 1, mask=count > 0, other=0)
    tl.store(counts + row, count)
    tl.store(roots + row, root)


def begin_round(state: RoundTensors, limits: torch.Tensor) -> torch.Tensor:
    """See `outrider.kernels.verify_round.begin_round`."""
    bs = state.counts.shape[0]
    roots = _launch.empty((bs, 1), torch.int32, limits.device)
    if bs:
        with _launch.on_device_of(limits):
            _begin[(bs,)](
                state.counts, state.committed_lens, state.tokens, state.tokens.shape[1], limits.contiguous(), roots, num_warps=1
            )  # fmt: skip
    return roots


@triton.jit
def _place(
    live, committed_lens, depths, num_nodes, page_table, table_stride, cached_lens, kv_lens, positions, next_positions, slots, columns,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) > 0
    cached = tl.where(alive, tl.load(committed_lens + row) - 1, 0)
    nodes = tl.load(num_nodes + row)
    tl.store(cached_lens + row, cached)
    tl.store(kv_lens + row, cached + nodes)
    node = tl.arange(0, BLOCK)
    inside = node < columns
    at = row * columns + node
    position = (cached + tl.load(depths + at, mask=inside, other=0)).to(tl.int64)
    tl.store(positions + at, position, mask=inside)
    tl.store(next_positions + at, position + 1, mask=inside)
    real = inside & alive & (node < nodes)
    index = cached + node
    page = tl.load(page_table + row * table_stride + index // PAGE_SIZE, mask=real, other=0).to(tl.int64)
    tl.store(slots + at, tl.where(real, page * PAGE_SIZE + index % PAGE_SIZE, -1), mask=inside)


def place_rows(
    live: torch.Tensor,
    committed_lens: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> PlacedRows:
    """See `outrider.kernels.verify_round.place_rows`."""
    bs, nodes = depths.shape
    device = depths.device
    placed = PlacedRows(
        cached_lens=_launch.empty((bs,), torch.int32, device),
        kv_lens=_launch.empty((bs,), torch.int32, device),
        positions=_launch.empty((bs * nodes,), torch.int64, device),
        next_positions=_launch.empty((bs * nodes,), torch.int64, device),
        slots=_launch.empty((bs * nodes,), torch.int64, device),
    )
    if bs:
        with _launch.on_device_of(depths):
            _place[(bs,)](
                live.contiguous(), committed_lens.contiguous(), depths.contiguous(), num_nodes.contiguous(), page_table,
                page_table.shape[1], placed.cached_lens, placed.kv_lens, placed.positions, placed.next_positions, placed.slots, nodes,
                PAGE_SIZE=page_size, BLOCK=_launch.next_power_of_2(nodes), num_warps=1,
            )  # fmt: skip
    return placed


@triton.jit
def _settle(
    live, cached_lens, num_nodes, num_accepted, path, emitted, page_table, table_stride,
    out_accepted, packed, feature_rows, feature_slots, state_committed, state_tokens, state_counts, nodes, columns, kept,
    PAGE_SIZE: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) > 0
    accepted = tl.where(alive, tl.minimum(tl.load(num_accepted + row), columns - 1), -1)
    column = tl.arange(0, BLOCK)
    on_path = column <= accepted
    node = tl.load(path + row * nodes + column, mask=on_path & (column < nodes), other=-1)
    token = tl.load(emitted + row * nodes + column, mask=on_path & (column < nodes), other=-1)
    tl.store(out_accepted + row, accepted)
    out = packed + row * (2 + 2 * columns)
    tl.store(out, accepted)
    tl.store(out + 1, tl.load(num_nodes + row))
    inside = column < columns
    tl.store(out + 2 + column, node, mask=inside)
    tl.store(out + 2 + columns + column, token, mask=inside)
    index = tl.load(cached_lens + row) + column
    page = tl.load(page_table + row * table_stride + index // PAGE_SIZE, mask=on_path, other=0).to(tl.int64)
    slot = tl.where(on_path, page * PAGE_SIZE + index % PAGE_SIZE, -1)
    tl.store(feature_rows + row * kept + column, row * nodes + tl.maximum(node, 0), mask=column < kept)
    tl.store(feature_slots + row * kept + column, slot, mask=column < kept)
    if STATE:
        bonus = tl.max(tl.where(column == accepted, token, -1), 0)
        count = tl.where(bonus >= 0, accepted + 1, 0)
        tl.store(state_tokens + row * columns + column, tl.where(column < count, token, 0), mask=inside)
        tl.store(state_committed + row, tl.load(state_committed + row) + count)
        tl.store(state_counts + row, count)


def settle_round(
    live: torch.Tensor,
    cached_lens: torch.Tensor,
    num_nodes: torch.Tensor,
    num_accepted: torch.Tensor,
    path: torch.Tensor,
    emitted: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    columns: int,
    state: RoundTensors | None,
) -> SettledRound:
    """See `outrider.kernels.verify_round.settle_round`."""
    bs, nodes = path.shape
    device = path.device
    kept = min(nodes, columns)
    settled = SettledRound(
        num_accepted=_launch.empty((bs,), torch.int32, device),
        packed=_launch.empty((bs, 2 + 2 * columns), torch.int32, device),
        feature_rows=_launch.empty((bs * kept,), torch.int64, device),
        feature_slots=_launch.empty((bs * kept,), torch.int64, device),
    )
    if bs:
        unused = settled.num_accepted
        with _launch.on_device_of(path):
            _settle[(bs,)](
                live.contiguous(), cached_lens.contiguous(), num_nodes.contiguous(), num_accepted.contiguous(), path.contiguous(),
                emitted.contiguous(), page_table, page_table.shape[1], settled.num_accepted, settled.packed, settled.feature_rows,
                settled.feature_slots, state.committed_lens if state else unused, state.tokens if state else unused,
                state.counts if state else unused, nodes, columns, kept, PAGE_SIZE=page_size, STATE=state is not None,
                BLOCK=_launch.next_power_of_2(columns), num_warps=1,
            )  # fmt: skip
    return settled
