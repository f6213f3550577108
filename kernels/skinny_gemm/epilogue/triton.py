"""Epilogues in Triton for the kernels that multiply few rows (`skinny_gemm.triton` and `skinny_gemm.rows`).

The constant EPILOGUE is the value of an `Epilogue`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from outrider.kernels.silu_mul.triton import gate


@triton.jit
def output_rows(n, EPILOGUE: tl.constexpr, HALF: tl.constexpr):
    """Return the weight row of each output n.

    If outputs are computed from pairs of weight rows (EPILOGUE >= 2), return the first row of the pair. This
    row is a gate row (GATED), or a dimension in the first half of a head (ROTATED).
    """
    return (n // HALF) * (2 * HALF) + n % HALF if EPILOGUE == 3 else n


@triton.jit
def tile_rows(tile, second, EPILOGUE: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a tile's weight rows and the output of each row. The two rows of a pair are adjacent."""
    if EPILOGUE < 2:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        row = n
    else:
        index = tl.arange(0, 2 * BLOCK_N)
        n = tile * BLOCK_N + index // 2
        row = output_rows(n, EPILOGUE, HALF) + index % 2 * second
    return row.to(tl.int64), n


@triton.jit
def _inverse_rms(sums, m, rows, parts, width, eps, PARTS: tl.constexpr):
    """Return 1 / sqrt(mean square + eps) of rows m ``[M]`` from partial sums of squares ``[parts, rows]``."""
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & (m < rows)[None, :]
    total = tl.sum(tl.load(sums + part[:, None] * rows + m[None, :], mask=inside, other=0.0), 0)
    return tl.rsqrt(total / width + eps)


@triton.jit
def load_constants(
    n,
    N,
    second,
    bias,
    scales,
    norm_weight,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the weights that an epilogue needs for outputs n.

    These are the scale, the bias and the norm's weight. For pairs, they also include the scale and the bias
    of the second row.

    No kernel writes weights, so a program loads them before it waits for the previous kernel. If the weights
    were loaded after the product, each load would cost a memory latency.
    """
    real, place = n < N, output_rows(n, EPILOGUE, HALF)
    scale = tl.full(n.shape, 1.0, tl.float32)
    scale_high = scale
    offset = scale
    offset_high = scale
    norm = scale
    if SCALED:
        scale = tl.load(scales + place, mask=real, other=0.0)
    if SCALED and EPILOGUE >= 2:
        scale_high = tl.load(scales + second + place, mask=real, other=0.0)
    if BIAS:
        offset = tl.load(bias + place, mask=real, other=0.0).to(tl.float32)
    if BIAS and EPILOGUE >= 2:
        offset_high = tl.load(bias + second + place, mask=real, other=0.0).to(tl.float32)
    if EPILOGUE == 1:
        norm = tl.load(norm_weight + n, mask=real, other=0.0).to(tl.float32)
    return scale, scale_high, offset, offset_high, norm


@triton.jit
def load_rows(
    m, n, rows, N, K, row_scales, sums, residual, residual_row, parts, eps, EPILOGUE: tl.constexpr,
    ROW_SCALED: tl.constexpr, NORMED: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return the factor of each row m ``[M]``, and the rows' residual ``[outputs, M]`` (ADD only)."""
    factor = tl.full(m.shape, 1.0, tl.float32)
    before = tl.full((n.shape[0], m.shape[0]), 0.0, tl.float32)
    if EPILOGUE == 1:
        element = (n < N)[:, None] & (m < rows)[None, :]
        before = tl.load(
            residual + m.to(tl.int64)[None, :] * residual_row + n[:, None], mask=element, other=0.0
        ).to(tl.float32)
    if ROW_SCALED:
        factor = tl.load(row_scales + m, mask=m < rows, other=0.0)
    if NORMED:
        factor *= _inverse_rms(sums, m, rows, parts, K, eps, PARTS)
    return factor, before


@triton.jit
def entries(m, rows, table_row, index, LOOKUP: tl.constexpr):
    """Return the start of the table entries of rows m, ``[M] int64``; zeros without LOOKUP."""
    begin = m.to(tl.int64) * 0
    if LOOKUP:
        begin = tl.load(index + m, mask=m < rows, other=0).to(tl.int64) * table_row
    return begin


@triton.jit
def look_up(
    begin, m, n, rows, N, second, table, EPILOGUE: tl.constexpr, HALF: tl.constexpr, LOOKUP: tl.constexpr
):
    """Return the table's contribution to outputs n of rows m ``[outputs, M]``; zeros without LOOKUP.

    The second result is the contribution to the second row of each pair (for ROTATED).

    The values are loaded long before they are needed. The function does not convert the values, because a
    conversion would have to wait for the loads.
    """
    low = tl.full((n.shape[0], m.shape[0]), 0.0, tl.float32)
    high = low
    if LOOKUP:
        element = (n < N)[:, None] & (m < rows)[None, :]
        place = table + begin[None, :] + output_rows(n, EPILOGUE, HALF)[:, None]
        low = tl.load(place, mask=element, other=0.0)
        high = tl.load(place + second, mask=element, other=0.0)
    return low, high


@triton.jit
def finish(
    acc, m, tile, constants, factor, before, found, out, scaled, sums, cos, sin, slots, k_plane, v_plane,
    rows, N, out_row,
    EPILOGUE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, GELU: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, LOOKUP: tl.constexpr, TRIGGER: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """Finish the products `acc` ``[rows of a tile, M] fp32`` of rows m, and store the results.

    `load_constants` returns `constants`, `load_rows` returns `factor` and `before`, and `look_up` returns
    `found`. With TRIGGER, the stores of the results are the program's last stores, and the next kernel is
    released just before these stores.
    """
    PAIRED: tl.constexpr = EPILOGUE >= 2
    scale, scale_high, offset, offset_high, norm = constants
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    low = acc
    high = acc
    if PAIRED:
        # The two rows of a pair are adjacent in the tile (`tile_rows`).
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, m.shape[0])), (0, 2, 1)))
    real_n, real_m, m64 = n < N, m < rows, m.to(tl.int64)
    element = real_n[:, None] & real_m[None, :]
    place = output_rows(n, EPILOGUE, HALF)
    low *= factor[None, :]
    if SCALED:
        low *= scale[:, None]
    if BIAS:
        low += offset[:, None]
    if PAIRED:
        high *= factor[None, :]
        if SCALED:
            high *= scale_high[:, None]
        if BIAS:
            high += offset_high[:, None]
    if LOOKUP:
        found_low, found_high = found
        low += found_low.to(tl.float32)
        high += found_high.to(tl.float32)
    if EPILOGUE == 0:
        if TRIGGER:
            gdc_launch_dependents()
        tl.store(out + m64[None, :] * N + n[:, None], low.to(out.dtype.element_ty), mask=element)
    if EPILOGUE == 1:
        low += before
        total = low.to(out.dtype.element_ty)
        kept = total.to(tl.float32)  # the norm applies to the rounded residual
        square = tl.sum(tl.where(element, kept * kept, 0.0), 0)
        if TRIGGER:
            gdc_launch_dependents()
        tl.store(out + m64[None, :] * out_row + n[:, None], total, mask=element)
        tl.store(
            scaled + m64[None, :] * N + n[:, None],
            (kept * norm[:, None]).to(scaled.dtype.element_ty),
            mask=element,
        )
        tl.store(sums + tile * rows + m, square, mask=real_m)
    if EPILOGUE == 2:
        result = gate(low, GELU) * high
        if TRIGGER:
            gdc_launch_dependents()
        tl.store(out + m64[None, :] * N + n[:, None], result.to(out.dtype.element_ty), mask=element)
    if EPILOGUE == 3:
        DIM: tl.constexpr = 2 * HALF
        head = n // HALF
        angle = m64[None, :] * DIM + (n % HALF)[:, None]
        cos_low = tl.load(cos + angle, mask=element, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + angle + HALF, mask=element, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=element, other=0.0).to(tl.float32)  # negated by `rope_angles`
        sin_high = tl.load(sin + angle + HALF, mask=element, other=0.0).to(tl.float32)
        new_low = low * cos_low + high * sin_low
        new_high = high * cos_high + low * sin_high
        slot = tl.load(slots + m, mask=real_m, other=-1)
        kept = element & (slot >= 0)[None, :]
        is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
        is_key = (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
        if TRIGGER:
            gdc_launch_dependents()
        query = out + m64[None, :] * (HEADS * DIM) + place[:, None]
        tl.store(query, new_low.to(out.dtype.element_ty), mask=element & is_query)
        tl.store(query + HALF, new_high.to(out.dtype.element_ty), mask=element & is_query)
        key = k_plane + slot[None, :] * (KV_HEADS * DIM) + (place - HEADS * DIM)[:, None]
        tl.store(key, new_low.to(k_plane.dtype.element_ty), mask=kept & is_key)
        tl.store(key + HALF, new_high.to(k_plane.dtype.element_ty), mask=kept & is_key)
        value = v_plane + slot[None, :] * (KV_HEADS * DIM) + (place - (HEADS + KV_HEADS) * DIM)[:, None]
        tl.store(value, low.to(v_plane.dtype.element_ty), mask=kept & is_value)
        tl.store(value + HALF, high.to(v_plane.dtype.element_ty), mask=kept & is_value)
