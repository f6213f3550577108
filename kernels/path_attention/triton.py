"""Triton version of path_attention. `kernels.path_attention` documents the op.

A program computes attention over one part of a row's history, for the query heads that share a K/V head. Part
i consists of PART tokens, starting at index i * PART. A second launch merges the parts of a row in order.

The parts of a row depend only on the row's own history. No kernel is specialised on a number that depends on
other rows.

The constant WIDEN converts the operands of a dot product to fp32. It is set only under Triton's interpreter,
which would read the bits of a bf16 operand as an integer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch

_LOG2E = 1.4426950408889634
_PART = 128  # tokens
_PARTIAL_BYTES = 1 << 26  # largest buffer of partial results; steps that need more run in several launches


@triton.jit(do_not_specialize=["first_row", "rows", "parts", "width", "table_stride", "last_page"])
def _fold(
    q, k_plane, v_plane, page_table, sequences, prefix_lens, lengths, columns, partial, stats, scale, softcap,
    first_row, rows, parts, width, table_stride, last_page,
    WIDEN: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    local, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (first_row + local).to(tl.int64)
    length = tl.load(lengths + row)
    first_seen = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    begin = part * PART
    end = tl.minimum(begin + PART, length)
    if (begin < end) & (end > first_seen):
        prefix_len = tl.load(prefix_lens + row)
        table = page_table + tl.load(sequences + row).to(tl.int64) * table_stride
        path = columns + row * width
        member, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + member
        element = (member < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + row * Q_ROW + head[:, None] * Q_HEAD + d[None, :], mask=element, other=0.0)
        if WIDEN:
            query = query.to(tl.float32)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for step in range(0, PART, BLOCK_N):
            j = begin + step + tl.arange(0, BLOCK_N)
            seen = (j < end) & (j >= first_seen)
            place = j - prefix_len  # index on the path, for tokens after the prefix
            behind = seen & (place >= 0)
            index = tl.where(
                behind, prefix_len + tl.load(path + place, mask=behind & (place < width), other=0), j
            )
            page = tl.load(table + tl.minimum(index // PAGE_SIZE, last_page), mask=seen, other=0).to(tl.int64)
            slot = ((page * PAGE_SIZE + index % PAGE_SIZE) * KV_HEADS + kv_head) * DIM
            k = tl.load(
                k_plane + slot[None, :] + d[:, None], mask=seen[None, :] & (d < DIM)[:, None], other=0.0
            )
            v = tl.load(
                v_plane + slot[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0
            )
            k, v = k.to(query.dtype), v.to(query.dtype)
            scores = tl.dot(query, k, input_precision="ieee") * scale
            if SOFTCAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh
            scores = tl.where(seen[None, :], scores, -float("inf"))  # in units of log2
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            top = new_top
        place_out = (local.to(tl.int64) * parts + part) * (KV_HEADS * GROUP) + head
        tl.store(partial + place_out[:, None] * DIM + d[None, :], acc, mask=element)
        tl.store(stats + 2 * place_out, top, mask=member < GROUP)
        tl.store(stats + 2 * place_out + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["first_row", "parts"])
def _merge(
    lengths, partial, stats, sinks, out, first_row, parts, HEADS: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    local, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_row + local
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    length = tl.load(lengths + row)
    first_part = tl.maximum(length - WINDOW, 0) // PART if WINDOW > 0 else 0
    last_part = tl.minimum(tl.cdiv(length, PART), parts)
    top = -float("inf")
    for part in range(first_part, last_part):
        top = tl.maximum(top, tl.load(stats + 2 * ((local * parts + part) * HEADS + head)))
    base = tl.where(top == -float("inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for part in range(first_part, last_part):
        place = (local * parts + part) * HEADS + head
        fade = tl.exp2(tl.load(stats + 2 * place) - base)
        total += fade * tl.load(stats + 2 * place + 1)
        acc += fade * tl.load(partial + place * DIM + d, mask=inside, other=0.0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - base)
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (row * HEADS + head) * DIM + d, result.to(out.dtype.element_ty), mask=inside)


def path_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    prefix_lens: torch.Tensor,
    lengths: torch.Tensor,
    columns: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    max_kv_len: int,
    window: int,
    softcap: float,
) -> torch.Tensor:
    rows, heads, dim = q.shape
    page_size, kv_heads = k_plane.shape[1:3]
    out = _launch.empty((rows, heads, dim), q.dtype, q.device)
    if rows == 0:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    parts = max(1, _launch.ceil_div(max_kv_len, _PART))
    step = max(1, min(rows, _PARTIAL_BYTES // (4 * parts * heads * dim)))
    group = heads // kv_heads
    block_d = max(16, _launch.next_power_of_2(dim))
    block_n = 16 if block_d > 256 else 32 if q.dtype == torch.float32 else 64
    partial = _launch.empty((step, parts, heads, dim), torch.float32, q.device)
    stats = _launch.empty((step, parts, heads, 2), torch.float32, q.device)
    table, logits = page_table.contiguous(), lengths if sinks is None else sinks.contiguous()
    arguments = (sequences.contiguous(), prefix_lens.contiguous(), lengths.contiguous(), columns.contiguous())
    with _launch.on_device_of(q):
        for first in range(0, rows, step):
            count = min(step, rows - first)
            _fold[(count, kv_heads, parts)](
                q, k_plane, v_plane, table, *arguments, partial, stats,
                scale / softcap if softcap > 0 else scale * _LOG2E, softcap * _LOG2E, first, rows, parts,
                columns.shape[1], table.shape[1], table.shape[1] - 1,
                WIDEN=not isinstance(_fold, triton.JITFunction), GROUP=group, KV_HEADS=kv_heads, DIM=dim,
                Q_ROW=q.stride(0), Q_HEAD=q.stride(1), PAGE_SIZE=page_size, WINDOW=max(window, 0),
                SOFTCAP=softcap > 0, PART=_PART, BLOCK_M=max(16, _launch.next_power_of_2(group)),
                BLOCK_N=block_n, BLOCK_D=block_d, num_warps=4, num_stages=1 if block_d > 256 else 2,
            )  # fmt: skip
            _merge[(count, heads)](
                arguments[2], partial, stats, logits, out, first, parts, HEADS=heads, DIM=dim,
                WINDOW=max(window, 0), SINKS=sinks is not None, PART=_PART, BLOCK_D=block_d, num_warps=1,
            )  # fmt: skip
    return out
