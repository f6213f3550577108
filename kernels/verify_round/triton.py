"""Triton version of verify_round: one program per sequence. The package documents the contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.verify.triton import walk_tree
from outrider.kernels.verify_round.types import MOST_PARTS, AcceptedRound, PlacedRows, RoundTensors


@triton.jit
def _begin(counts, committed_lens, tokens, token_stride, limits, roots, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    count = tl.where(tl.load(committed_lens + row) < tl.load(limits + row), count, 0)
    root = tl.load(tokens + row * token_stride + count - 1, mask=count > 0, other=0)
    if PDL:
        gdc_launch_dependents()
    tl.store(counts + row, count)
    tl.store(roots + row, root)


def begin_round(state: RoundTensors, limits: torch.Tensor) -> torch.Tensor:
    bs = state.counts.shape[0]
    roots = _launch.empty((bs, 1), torch.int32, limits.device)
    if bs:
        with _launch.on_device_of(limits):
            _begin[(bs,)](
                state.counts, state.committed_lens, state.tokens, state.tokens.shape[1], limits.contiguous(), roots, num_warps=1,
                **_launch.dependent(limits),
            )  # fmt: skip
    return roots


@triton.jit
def _place(
    live, committed_lens, depths, num_nodes, page_table, table_stride, cached_lens, kv_lens, positions, next_positions, slots, columns,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) > 0
    cached = tl.where(alive, tl.load(committed_lens + row) - 1, 0)
    nodes = tl.load(num_nodes + row)
    node = tl.arange(0, BLOCK)
    inside = node < columns
    at = row * columns + node
    position = (cached + tl.load(depths + at, mask=inside, other=0)).to(tl.int64)
    real = inside & alive & (node < nodes)
    index = cached + node
    page = tl.load(page_table + row * table_stride + index // PAGE_SIZE, mask=real, other=0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    tl.store(cached_lens + row, cached)
    tl.store(kv_lens + row, cached + nodes)
    tl.store(positions + at, position, mask=inside)
    tl.store(next_positions + at, position + 1, mask=inside)
    tl.store(slots + at, tl.where(real, page * PAGE_SIZE + index % PAGE_SIZE, -1), mask=inside)


def place_rows(
    live: torch.Tensor,
    committed_lens: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> PlacedRows:
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
                PAGE_SIZE=page_size, BLOCK=_launch.next_power_of_2(nodes), num_warps=1, **_launch.dependent(depths),
            )  # fmt: skip
    return placed


@triton.jit
def _accept(
    live, cached_lens, tokens, parents, num_nodes, chosen, page_table, table_stride,
    path, out_accepted, packed, feature_rows, feature_slots, state_committed, state_tokens, state_counts, nodes, columns, kept,
    PAGE_SIZE: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) > 0
    real_nodes = tl.load(num_nodes + row)
    cached = tl.load(cached_lens + row)
    at = tl.arange(0, BLOCK)  # both a node of the tree and an index on the path
    # 1. Walk the tree; idle rows accept nothing.
    walked, said, accepted = walk_tree(tokens, parents, chosen, row, real_nodes, nodes, BLOCK)
    taken = tl.where(alive, tl.minimum(accepted, columns - 1), -1)
    on_path = at <= taken
    node = tl.where(on_path, walked, -1)
    token = tl.where(on_path, said, -1)
    # 2. Locate the slots of the accepted path.
    index = cached + at
    page = tl.load(page_table + row * table_stride + index // PAGE_SIZE, mask=on_path, other=0).to(tl.int64)
    slot = tl.where(on_path, page * PAGE_SIZE + index % PAGE_SIZE, -1)
    inside = at < columns
    # 3. Store the results for the host, the feature rows and the next round.
    committed = cached
    if STATE:
        committed = tl.load(state_committed + row)
    if PDL:
        gdc_launch_dependents()
    tl.store(path + row * nodes + at, walked, mask=at < nodes)
    tl.store(out_accepted + row, taken)
    out = packed + row * (2 + 2 * columns)
    tl.store(out, taken)
    tl.store(out + 1, real_nodes)
    tl.store(out + 2 + at, node, mask=inside)
    tl.store(out + 2 + columns + at, token, mask=inside)
    tl.store(feature_rows + row * kept + at, row * nodes + tl.maximum(node, 0), mask=at < kept)
    tl.store(feature_slots + row * kept + at, slot, mask=at < kept)
    if STATE:
        bonus = tl.max(tl.where(at == taken, token, -1), 0)
        count = tl.where(bonus >= 0, taken + 1, 0)
        tl.store(state_tokens + row * columns + at, tl.where(at < count, token, 0), mask=inside)
        tl.store(state_committed + row, committed + count)
        tl.store(state_counts + row, count)


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
    device = tokens.device
    kept = min(nodes, columns)
    accepted = AcceptedRound(
        path=_launch.empty((bs, nodes), torch.int32, device),
        num_accepted=_launch.empty((bs,), torch.int32, device),
        packed=_launch.empty((bs, 2 + 2 * columns), torch.int32, device),
        feature_rows=_launch.empty((bs * kept,), torch.int64, device),
        feature_slots=_launch.empty((bs * kept,), torch.int64, device),
    )
    if bs:
        unused = accepted.num_accepted
        with _launch.on_device_of(tokens):
            _accept[(bs,)](
                live.contiguous(), cached_lens.contiguous(), tokens.contiguous(), parents.contiguous(), num_nodes.contiguous(),
                chosen.contiguous(), page_table, page_table.shape[1], accepted.path, accepted.num_accepted, accepted.packed,
                accepted.feature_rows, accepted.feature_slots, state.committed_lens if state else unused, state.tokens if state else unused,
                state.counts if state else unused, nodes, columns, kept, PAGE_SIZE=page_size, STATE=state is not None,
                BLOCK=_launch.next_power_of_2(max(nodes, columns)), num_warps=1, **_launch.dependent(tokens),
            )  # fmt: skip
    return accepted


@triton.jit
def _post(packed, ring, turn, size, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    now = tl.load(turn)
    at = tl.arange(0, BLOCK)
    place = ring + now.to(tl.int64) * size
    for start in range(0, size, BLOCK):
        inside = start + at < size
        tl.store(place + start + at, tl.load(packed + start + at, mask=inside, other=0), mask=inside)
    if PDL:
        gdc_launch_dependents()
    tl.store(turn, (now + 1) % PLACES)


def post_round(packed: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Compute `outrider.kernels.verify_round.post_round` with a single program, since it copies few words."""
    with _launch.on_device_of(packed):
        _post[(1,)](
            packed, ring, turn, packed.numel(), PLACES=ring.shape[0], BLOCK=1024, num_warps=4, **_launch.dependent(packed)
        )  # fmt: skip


@triton.jit
def _copy_words(source, target, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        inside = start + at < size
        tl.store(target + start + at, tl.load(source + start + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["size_0", "size_1", "size_2", "size_3", "size"])
def _post_parts(
    part_0, part_1, part_2, part_3, ring, turn, size_0, size_1, size_2, size_3, size,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    now = tl.load(turn)
    place = ring + now.to(tl.int64) * size
    _copy_words(part_0, place, size_0, BLOCK)
    _copy_words(part_1, place + size_0, size_1, BLOCK)
    _copy_words(part_2, place + size_0 + size_1, size_2, BLOCK)
    _copy_words(part_3, place + size_0 + size_1 + size_2, size_3, BLOCK)
    if PDL:
        gdc_launch_dependents()
    tl.store(turn, (now + 1) % PLACES)


def post_parts(parts: Sequence[torch.Tensor], ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Compute `outrider.kernels.verify_round.post_parts` with a single program, like `post_round`."""
    sources = [*parts, *[turn] * (MOST_PARTS - len(parts))]
    sizes = [part.numel() for part in parts] + [0] * (MOST_PARTS - len(parts))
    with _launch.on_device_of(turn):
        _post_parts[(1,)](
            *sources, ring, turn, *sizes, ring.shape[1], PLACES=ring.shape[0], BLOCK=1024, num_warps=4, **_launch.dependent(turn)
        )  # fmt: skip
