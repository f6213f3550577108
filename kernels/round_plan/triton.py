"""Triton version of round_plan: one program per sequence. `kernels.round_plan` documents the op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.round_plan.types import RowPlan


# Clients choose the depth and the branches of their trees. Each constant would be a kernel of its own.
@triton.jit(do_not_specialize=["table_stride", "bs", "rows", "columns", "depth", "topk"])
def _plan(
    committed_lens, counts, tokens, max_nodes, page_table, table_stride, out_tokens, out_features,
    extend_slots, level_slots, positions, lens, root_tokens, out_nodes, bs, rows, columns, depth, topk,
    PAGE_SIZE: tl.constexpr, LEAD: tl.constexpr, BEHIND: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    sequence = tl.program_id(0)
    count = tl.load(counts + sequence)
    busy = count > 0
    last = tl.where(busy, tl.load(committed_lens + sequence) - 1 + LEAD - BEHIND, 0)  # may be negative
    stable = tl.maximum(last, 0)
    table = page_table + sequence.to(tl.int64) * table_stride
    column = tl.arange(0, BLOCK_R)
    source = column - (rows - count)  # column of the fresh token; below 0 for padding
    inside = column < rows
    index = last - rows + column
    given = inside & (source >= 0)
    fresh = given & (index >= 0)
    row = sequence * rows + column
    token = tl.load(tokens + sequence * columns + source, mask=given, other=0)
    page = tl.load(table + index // PAGE_SIZE, mask=fresh, other=0).to(tl.int64)
    scratch = tl.arange(0, BLOCK_L)
    ahead = stable + scratch
    drafted = scratch < (depth - 1) * topk
    scratch_page = tl.load(table + ahead // PAGE_SIZE, mask=drafted & busy, other=0).to(tl.int64)
    nodes = tl.where(busy, tl.load(max_nodes + sequence), 1)
    if PDL:
        gdc_launch_dependents()
    tl.store(out_tokens + row, token, mask=inside)
    tl.store(out_features + row, sequence * columns + tl.maximum(source, 0), mask=inside)
    tl.store(extend_slots + row, tl.where(fresh, page * PAGE_SIZE + index % PAGE_SIZE, -1), mask=inside)
    tl.store(positions + row, tl.maximum(index, 0), mask=inside)
    tl.store(root_tokens + sequence, tl.sum(tl.where(column == rows - 1, token, 0), 0))
    tl.store(out_nodes + sequence, nodes)
    level = scratch // topk  # level - 1
    at = (level * bs + sequence) * topk + scratch % topk
    tl.store(level_slots + at, tl.where(busy, scratch_page * PAGE_SIZE + ahead % PAGE_SIZE, -1), mask=drafted)
    tl.store(positions + bs * rows + at, tl.maximum(last + level, 0), mask=drafted)
    step = tl.arange(0, BLOCK_D)  # rows of lens: before the extension, then one per level from 0
    length = tl.where(step == 0, tl.maximum(last - count, 0), stable + tl.where(busy, (step - 1) * topk, 0))
    tl.store(lens + step * bs + sequence, length, mask=step <= depth)


def round_plan(
    committed_lens: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    max_nodes: torch.Tensor,
    page_table: torch.Tensor,
    rows: int,
    depth: int,
    topk: int,
    page_size: int,
    lead: int,
    behind: int,
) -> RowPlan:
    bs, columns = tokens.shape
    device = tokens.device
    scratch = (depth - 1) * topk

    def integers(*shape: int) -> torch.Tensor:
        return _launch.empty(shape, torch.int32, device)

    plan = RowPlan(
        tokens=integers(bs * rows),
        features=integers(bs * rows),
        extend_slots=_launch.empty((bs * rows,), torch.int64, device),
        level_slots=_launch.empty((depth - 1, bs * topk), torch.int64, device),
        positions=integers(bs * rows + bs * scratch),
        lens=integers(1 + depth, bs),
        root_tokens=integers(bs),
        max_nodes=integers(bs),
    )
    if bs:
        with _launch.on_device_of(tokens):
            _plan[(bs,)](
                committed_lens.contiguous(), counts.contiguous(), tokens.contiguous(), max_nodes.contiguous(),
                page_table, page_table.stride(0), plan.tokens, plan.features, plan.extend_slots,
                plan.level_slots, plan.positions, plan.lens, plan.root_tokens, plan.max_nodes, bs, rows,
                columns, depth, topk, PAGE_SIZE=page_size, LEAD=lead, BEHIND=behind,
                BLOCK_R=_launch.lanes(rows), BLOCK_L=_launch.lanes(scratch),
                BLOCK_D=_launch.lanes(1 + depth), num_warps=1, **_launch.dependent(tokens),
            )  # fmt: skip
    return plan
