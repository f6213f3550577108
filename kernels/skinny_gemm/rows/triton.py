"""Triton kernels for products of 1 to 4 rows without tensor cores; a program loads whole rows of the weight.

A program loads its part of the weight before it waits for the previous kernel, because no kernel writes
weights.

FP8 weights: converting weights to fp32 one number at a time takes longer than reading them from memory.
`stay_rows` therefore reads eight numbers as one word (BYTES), and multiplies them as pairs of f16. This type
represents every e4m3 number exactly. Groups of four products are added in f16, and the groups' sums in fp32.

Range: x is scaled by a power of two so that its largest number is below 16. A sum of four products is then
below 4 * 448 * 16. This is less than 65504, the largest f16 number. Numbers of x below about 2^-28 of the
largest one may underflow. Together, these effects change a sum by a fifth of the error that rounding to bf16
causes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.skinny_gemm.epilogue.triton import (
    entries,
    finish,
    load_constants,
    load_rows,
    look_up,
    tile_rows,
)


@triton.jit
def _load_weights(
    weight, tile, second, N, K, EPILOGUE: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the weight rows of a tile, ``[rows, BLOCK_K]``. With BYTES, elements are words of eight numbers.

    EVEN means that K equals BLOCK_K.
    """
    EACH: tl.constexpr = 8 if BYTES else 1
    row, n = tile_rows(tile, second, EPILOGUE, HALF, BLOCK_N)
    k = tl.arange(0, BLOCK_K // EACH)
    inside = (n < N)[:, None] if EVEN else (n < N)[:, None] & (k < K // EACH)[None, :]
    return tl.load(
        weight + row[:, None] * (K // EACH) + k[None, :],
        mask=inside,
        other=0 if BYTES else 0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _load_x(x, K, BLOCK_K: tl.constexpr):
    """Return a row of x, ``[BLOCK_K] fp32``."""
    k = tl.arange(0, BLOCK_K)
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _prepare(values, BYTES: tl.constexpr):
    """Return x in the form that `_products` needs, and the factor for the sums of these products.

    The form is four tensors. With BYTES, the tensors are ``[1, K / 8] int32``, and each element packs two f16
    numbers. Otherwise, each of the four tensors is x itself.
    """
    if BYTES:
        exponent = tl.max(tl.abs(values), 0).to(tl.int32, bitcast=True) >> 23  # biased by 127
        # Biased exponent of the scale. The scale brings the largest number to between 8 and 16. The limits 1
        # and 253 ensure that the scale and its inverse are normal numbers.
        up = tl.minimum(tl.maximum(257 - exponent, 1), 253)
        scaled = values * (up << 23).to(tl.float32, bitcast=True)
        even, odd = tl.split(tl.reshape(scaled, (values.shape[0] // 8, 2, 2, 2)))
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
        front, back = tl.split(pairs)
        x0, x2 = tl.split(front)
        x1, x3 = tl.split(back)
        x0, x1, x2, x3 = x0[None, :], x1[None, :], x2[None, :], x3[None, :]
        factor = ((254 - up) << 23).to(tl.float32, bitcast=True)
    else:
        x0 = values[None, :]
        x1, x2, x3, factor = x0, x0, x0, 1.0
    return x0, x1, x2, x3, factor


@triton.jit
def _products(weights, x0, x1, x2, x3, BYTES: tl.constexpr):
    """Return weights times x in fp32; with BYTES, summed over the eight numbers of each word."""
    if BYTES:
        products = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, a, b, c, d;
            .reg .b16 p, q, r, s;
            .reg .f32 even, odd;
            mov.b64 {low, high}, $1;
            mov.b32 {p, q}, low;
            mov.b32 {r, s}, high;
            cvt.rn.f16x2.e4m3x2 a, p;
            cvt.rn.f16x2.e4m3x2 b, q;
            cvt.rn.f16x2.e4m3x2 c, r;
            cvt.rn.f16x2.e4m3x2 d, s;
            mul.rn.f16x2 a, a, $2;
            fma.rn.f16x2 a, b, $3, a;
            fma.rn.f16x2 a, c, $4, a;
            fma.rn.f16x2 a, d, $5, a;
            mov.b32 {p, q}, a;
            cvt.f32.f16 even, p;
            cvt.f32.f16 odd, q;
            add.f32 $0, even, odd;
            }""",
            "=f,l,r,r,r,r", [weights, x0, x1, x2, x3], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        products = weights.to(tl.float32) * x0
    return products


@triton.jit
def _let_in(last):
    """Release the next kernel at this program's last tile, when all loads of the program are in flight."""
    if last:
        gdc_launch_dependents()


@triton.jit
def sum_rows(
    x, weight, out, bias, scales, residual, norm_weight, scaled, sums, cos, sin, slots, k_plane, v_plane,
    table, index, N, K, second, x_row, residual_row, out_row, table_row, parts, eps,
    ROWS: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    NORMED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, LOOKUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute one tile of the product of up to four rows of x."""
    tile = tl.program_id(0)
    weights = _load_weights(weight, tile, second, N, K, EPILOGUE, HALF, EVEN, False, BLOCK_N, BLOCK_K)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    constants = load_constants(output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    for nth in tl.static_range(ROWS):
        m = nth + tl.arange(0, 1)
        begin = entries(m, ROWS, table_row, index, LOOKUP)
        found = look_up(begin, m, output, ROWS, N, second, table, EPILOGUE, HALF, LOOKUP)
        values = _load_x(x + nth * x_row, K, BLOCK_K)
        factor, before = load_rows(
            m, output, ROWS, N, K, scales, sums, residual, residual_row, parts, eps, EPILOGUE, False, NORMED,
            PARTS
        )  # fmt: skip
        acc = tl.sum(weights.to(tl.float32) * values[None, :], 1)[:, None]
        finish(
            acc, m, tile, constants, factor, before, found, out, scaled, sums, cos, sin, slots, k_plane,
            v_plane, ROWS, N, out_row, EPILOGUE, BIAS, SCALED, GELU, HEADS, KV_HEADS, HALF, LOOKUP,
            PDL and not EARLY and nth == ROWS - 1, BLOCK_N
        )  # fmt: skip


@triton.jit
def stay_rows(
    x, weight, out, bias, scales, residual, norm_weight, scaled, sums, cos, sin, slots, k_plane, v_plane,
    table, index, N, K, second, x_row, residual_row, out_row, table_row, parts, eps, programs,
    EPILOGUE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr,
    GELU: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    LOOKUP: tl.constexpr, EVEN: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute every `programs`-th tile of the product of one row of x.

    The program reads x once. While a tile is computed, the loads for the next tile are in flight.
    """
    first = tl.program_id(0)
    m = tl.arange(0, 1)
    weights = _load_weights(weight, first, second, N, K, EPILOGUE, HALF, EVEN, BYTES, BLOCK_N, BLOCK_K)
    output = first * BLOCK_N + tl.arange(0, BLOCK_N)
    constants = load_constants(output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    begin = entries(m, 1, table_row, index, LOOKUP)
    found = look_up(begin, m, output, 1, N, second, table, EPILOGUE, HALF, LOOKUP)
    factor, before = load_rows(
        m, output, 1, N, K, scales, sums, residual, residual_row, parts, eps, EPILOGUE, False, NORMED, PARTS
    )
    x0, x1, x2, x3, undo = _prepare(_load_x(x, K, BLOCK_K), BYTES)
    factor *= undo
    tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(first, tiles, programs):
        next_weights = _load_weights(
            weight, tile + programs, second, N, K, EPILOGUE, HALF, EVEN, BYTES, BLOCK_N, BLOCK_K
        )
        output = (tile + programs) * BLOCK_N + tl.arange(0, BLOCK_N)
        next_constants = load_constants(
            output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF
        )
        _, next_before = load_rows(
            m,
            output,
            1,
            N,
            K,
            scales,
            sums,
            residual,
            residual_row,
            parts,
            eps,
            EPILOGUE,
            False,
            False,
            PARTS,
        )
        next_found = look_up(begin, m, output, 1, N, second, table, EPILOGUE, HALF, LOOKUP)
        if PDL and not EARLY:
            _let_in(tile + programs >= tiles)
        acc = tl.sum(_products(weights, x0, x1, x2, x3, BYTES), 1)[:, None]
        finish(
            acc, m, tile, constants, factor, before, found, out, scaled, sums, cos, sin, slots, k_plane,
            v_plane, 1, N, out_row, EPILOGUE, BIAS, SCALED, GELU, HEADS, KV_HEADS, HALF, LOOKUP, False,
            BLOCK_N
        )  # fmt: skip
        weights, constants, before, found = next_weights, next_constants, next_before, next_found
