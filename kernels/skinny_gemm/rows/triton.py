"""Products of 1 to 4 rows: multiply and add, a whole row of the weight at once.

What a program reads of the weight it asks for before it waits for the kernel before it: nobody writes weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.skinny_gemm.epilogue.triton import finish, load_constants, load_rows, tile_rows


@triton.jit
def _load_weights(
    weight, tile, second, N, K, EPILOGUE: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the rows of the weight of a tile, ``[rows, BLOCK_K]``; EVEN: K is BLOCK_K."""
    row, n = tile_rows(tile, second, EPILOGUE, HALF, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] if EVEN else (n < N)[:, None] & (k < K)[None, :]
    return tl.load(weight + row[:, None] * K + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_x(x, K, BLOCK_K: tl.constexpr):
    """Return a row of x, ``[1, BLOCK_K] fp32``."""
    k = tl.arange(0, BLOCK_K)
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _let_in(last):
    """Let the next kernel in if this program computes its last tile: all that it reads is on its way."""
    if last:
        gdc_launch_dependents()


@triton.jit
def sum_rows(
    x, weight, out, bias, scales, residual, norm_weight, scaled, sums, cos, sin, slots, k_plane, v_plane,
    N, K, second, x_row, residual_row, out_row, parts, eps,
    ROWS: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute one tile of up to four rows of x."""
    tile = tl.program_id(0)
    weights = _load_weights(weight, tile, second, N, K, EPILOGUE, HALF, EVEN, BLOCK_N, BLOCK_K)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    constants = load_constants(output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    for index in tl.static_range(ROWS):
        m = index + tl.arange(0, 1)
        values = _load_x(x + index * x_row, K, BLOCK_K)
        factor, before = load_rows(
            m, output, ROWS, N, K, scales, sums, residual, residual_row, parts, eps, EPILOGUE, False, NORMED, PARTS
        )  # fmt: skip
        acc = tl.sum(weights.to(tl.float32) * values, 1)[:, None]
        finish(
            acc, m, tile, constants, factor, before, out, scaled, sums, cos, sin, slots, k_plane, v_plane, ROWS, N, out_row, EPILOGUE,
            BIAS, SCALED, GELU, HEADS, KV_HEADS, HALF, PDL and not EARLY and index == ROWS - 1, BLOCK_N
        )  # fmt: skip


@triton.jit
def stay_rows(
    x, weight, out, bias, scales, residual, norm_weight, scaled, sums, cos, sin, slots, k_plane, v_plane,
    N, K, second, x_row, residual_row, out_row, parts, eps, programs,
    EPILOGUE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute every `programs`-th tile of one row of x, which is read once; what the next tile needs is on its way meanwhile."""
    first = tl.program_id(0)
    m = tl.arange(0, 1)
    weights = _load_weights(weight, first, second, N, K, EPILOGUE, HALF, EVEN, BLOCK_N, BLOCK_K)
    output = first * BLOCK_N + tl.arange(0, BLOCK_N)
    constants = load_constants(output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    factor, before = load_rows(m, output, 1, N, K, scales, sums, residual, residual_row, parts, eps, EPILOGUE, False, NORMED, PARTS)
    values = _load_x(x, K, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(first, tiles, programs):
        next_weights = _load_weights(weight, tile + programs, second, N, K, EPILOGUE, HALF, EVEN, BLOCK_N, BLOCK_K)
        output = (tile + programs) * BLOCK_N + tl.arange(0, BLOCK_N)
        next_constants = load_constants(output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF)
        _, next_before = load_rows(m, output, 1, N, K, scales, sums, residual, residual_row, parts, eps, EPILOGUE, False, False, PARTS)
        if PDL and not EARLY:
            _let_in(tile + programs >= tiles)
        acc = tl.sum(weights.to(tl.float32) * values, 1)[:, None]
        finish(
            acc, m, tile, constants, factor, before, out, scaled, sums, cos, sin, slots, k_plane, v_plane, 1, N, out_row, EPILOGUE, BIAS,
            SCALED, GELU, HEADS, KV_HEADS, HALF, False, BLOCK_N
        )  # fmt: skip
        weights, constants, before = next_weights, next_constants, next_before
