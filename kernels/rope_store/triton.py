"""Triton version of rope_store. `kernels.rope_store` documents the ops.

A program handles some heads of one row. It loads the two halves of each head separately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.rope_store.types import Lookup
from outrider.kernels.stream import FEW_ROWS, ResidualStream


@triton.jit
def _angles(
    positions, frequencies, cos, sin, factor, DIM: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    if PDL:
        gdc_wait()
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + d, mask=inside, other=0.0)
    sign = tl.where(d < DIM // 2, -factor, factor)
    if PDL:
        gdc_launch_dependents()
    tl.store(cos + row * DIM + d, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + row * DIM + d, (tl.sin(angle) * sign).to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _rope_store(
    parts, cos, sin, k_plane, v_plane, slots, sums, bias, head_norm, table, index, q, rows, width, sum_parts,
    eps, head_eps, table_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr,
    NORMED: tl.constexpr, SUM_PARTS: tl.constexpr, BIAS: tl.constexpr, HEAD_NORM: tl.constexpr,
    LOOKUP: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    DIM: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head, d = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real = (d < HALF)[None, :]
    inside = (head < ALL)[:, None] & real
    column = head[:, None] * DIM + d[None, :]
    if PDL:
        gdc_wait()
    slot = tl.load(slots + row)
    # 1. Complete the product: add the parts, divide by the root mean square, add bias and lookup.
    low = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    high = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        base = parts + (split * rows + row) * (ALL * DIM) + column
        low += tl.load(base, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(base + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        part = tl.arange(0, SUM_PARTS)
        square = tl.sum(tl.load(sums + part * rows + row, mask=part < sum_parts, other=0.0), 0)
        inverse = tl.rsqrt(square / width + eps)
        low, high = low * inverse, high * inverse
    if BIAS:
        low += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + column + HALF, mask=inside, other=0.0).to(tl.float32)
    if LOOKUP:
        found = table + tl.load(index + row).to(tl.int64) * table_row + column
        low += tl.load(found, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(found + HALF, mask=inside, other=0.0).to(tl.float32)
    # 2. Norm the heads of q and k (HEAD_NORM), and rotate.
    angle = row * DIM + d
    cos_low = tl.load(cos + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    # The first half of sin is negated by `rope_angles`.
    sin_low = tl.load(sin + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    turn_low, turn_high = low, high
    if HEAD_NORM:
        inverse_head = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + head_eps)[:, None]
        turned = (head < HEADS + KV_HEADS)[:, None] & real
        turn_low = low * inverse_head * tl.load(head_norm + column, mask=turned, other=0.0).to(tl.float32)
        turn_high = (
            high * inverse_head * tl.load(head_norm + column + HALF, mask=turned, other=0.0).to(tl.float32)
        )
    new_low = turn_low * cos_low + turn_high * sin_low
    new_high = turn_high * cos_high + turn_low * sin_high
    # 3. Store queries to q, keys and values to their planes.
    if PDL:
        gdc_launch_dependents()
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    places = q + row * (HEADS * DIM) + column
    tl.store(places, new_low.to(q.dtype.element_ty), mask=is_query & real)
    tl.store(places + HALF, new_high.to(q.dtype.element_ty), mask=is_query & real)
    if slot >= 0:
        keys = k_plane + slot * (KV_HEADS * DIM) + (column - HEADS * DIM)
        is_key = (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None] & real
        tl.store(keys, new_low.to(k_plane.dtype.element_ty), mask=is_key)
        tl.store(keys + HALF, new_high.to(k_plane.dtype.element_ty), mask=is_key)
        values = v_plane + slot * (KV_HEADS * DIM) + (column - (HEADS + KV_HEADS) * DIM)
        tl.store(values, low.to(v_plane.dtype.element_ty), mask=is_value & inside)
        tl.store(values + HALF, high.to(v_plane.dtype.element_ty), mask=is_value & inside)


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, dim = positions.shape[0], frequencies.shape[0]
    cos, sin = (_launch.empty((rows, 1, dim), dtype, frequencies.device) for _ in range(2))
    if rows:
        with _launch.on_device_of(frequencies):
            _angles[(rows,)](
                positions.contiguous(), frequencies, cos, sin, factor, DIM=dim,
                BLOCK=_launch.next_power_of_2(dim), num_warps=1, **_launch.dependent(frequencies),
            )  # fmt: skip
    return cos, sin


def rope_store(
    parts: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    slots: torch.Tensor,
    stream: ResidualStream | None,
    bias: torch.Tensor | None,
    head_norm: torch.Tensor | None,
    head_eps: float,
    lookup: Lookup | None,
) -> torch.Tensor:
    kv_heads, dim = k_plane.shape[2:]
    rows, heads = parts.shape[-2], parts.shape[-1] // dim - 2 * kv_heads
    q = _launch.empty((rows, heads, dim), cos.dtype, parts.device)
    if rows == 0:
        return q
    sums = None if stream is None else stream.sums
    late = _launch.dependent(parts)
    sum_parts = 1 if sums is None else sums.shape[0]
    block_d = _launch.next_power_of_2(dim // 2)
    many = rows > FEW_ROWS
    block_h = max(1, min(_launch.next_power_of_2(heads + 2 * kv_heads), 1024 // block_d)) if many else 1
    warps = 4 if many else 1
    with _launch.on_device_of(parts):
        _rope_store[(_launch.ceil_div(heads + 2 * kv_heads, block_h), rows)](
            parts, cos.contiguous(), sin.contiguous(), k_plane, v_plane, slots.contiguous(),
            q if sums is None else sums, q if bias is None else bias,
            q if head_norm is None else head_norm.contiguous(),
            *((lookup.table, lookup.index) if lookup else (q, q)), q, rows,
            1 if stream is None else stream.scaled.shape[1], sum_parts, 0.0 if stream is None else stream.eps,
            head_eps, lookup.table.stride(0) if lookup else 0,
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, SPLITS=parts.shape[0] if parts.dim() == 3 else 1,
            NORMED=sums is not None, SUM_PARTS=_launch.next_power_of_2(sum_parts), BIAS=bias is not None,
            HEAD_NORM=head_norm is not None, LOOKUP=lookup is not None, BLOCK_H=block_h, BLOCK_D=block_d,
            num_warps=warps, **late,
        )  # fmt: skip
    return q
