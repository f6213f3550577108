"""The gated product of some 65 to 512 rows in Triton; see `outrider.kernels.skinny_gemm.project_gated`.

A program computes pairs of outputs in up to three pieces whose widths are powers of two, so that 14336 pairs are 128 programs of 112: one
for nearly every multiprocessor of an H200, where tiles of 64 or 128 leave a sixth of them without work at the end. The gates and the values
of a piece come as one operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.silu_mul.triton import gate
from outrider.kernels.skinny_gemm.types import Tile
from outrider.kernels.skinny_gemm.wide.maps import tiles_of
from outrider.kernels.stream import Stream

_PIECES = 3


@triton.jit
def _multiply(acc, left, weight, first, k, WIDTH: tl.constexpr, WIDEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add the product of ``left [M, BLOCK_K]`` with the gates, and behind them the values, of WIDTH pairs from `first` on."""
    right = weight.load([0, first, k]).reshape(2 * WIDTH, BLOCK_K)
    if WIDEN:
        right = right.to(tl.float32)
    return tl.dot(left, right.T, acc, input_precision="ieee")


@triton.jit
def _store(acc, inverse, bias, out, m, first, rows, N, BIAS: tl.constexpr, GELU: tl.constexpr, WIDTH: tl.constexpr):
    """Store ``act(gate) * value`` of the products `acc` of rows m with WIDTH pairs from `first` on."""
    n = first + tl.arange(0, WIDTH)
    low, high = tl.split(tl.permute(tl.reshape(acc, (m.shape[0], 2, WIDTH)), (0, 2, 1)))
    low *= inverse[:, None]
    high *= inverse[:, None]
    if BIAS:
        low += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        high += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    result = gate(low, GELU) * high
    element = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=element)


@triton.jit(do_not_specialize=("rows", "parts"))
def _gated_tiles(
    x, weight, weight_2, weight_3, out, bias, sums, rows, N, K, parts, eps,
    BIAS: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_3: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    first_m, first = tl.program_id(0) * BLOCK_M, tl.program_id(1) * (WIDTH + WIDTH_2 + WIDTH_3)
    second, third = first + WIDTH, first + WIDTH + WIDTH_2
    m = first_m + tl.arange(0, BLOCK_M)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_M, 2 * WIDTH), tl.float32)
    if WIDTH_2:
        acc_2 = tl.zeros((BLOCK_M, 2 * WIDTH_2), tl.float32)
    if WIDTH_3:
        acc_3 = tl.zeros((BLOCK_M, 2 * WIDTH_3), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        left = x.load([first_m, k])
        if WIDEN:
            left = left.to(tl.float32)
        acc = _multiply(acc, left, weight, first, k, WIDTH, WIDEN, BLOCK_K)
        if WIDTH_2:
            acc_2 = _multiply(acc_2, left, weight_2, second, k, WIDTH_2, WIDEN, BLOCK_K)
        if WIDTH_3:
            acc_3 = _multiply(acc_3, left, weight_3, third, k, WIDTH_3, WIDEN, BLOCK_K)
    inverse = tl.full((BLOCK_M,), 1.0, tl.float32)
    if NORMED:
        part = tl.arange(0, PARTS)
        inside = (m < rows)[:, None] & (part < parts)[None, :]
        square = tl.sum(tl.load(sums + part[None, :] * rows + m[:, None], mask=inside, other=0.0), 1)
        inverse = tl.rsqrt(square / K + eps)
    if PDL:
        gdc_launch_dependents()
    _store(acc, inverse, bias, out, m, first, rows, N, BIAS, GELU, WIDTH)
    if WIDTH_2:
        _store(acc_2, inverse, bias, out, m, second, rows, N, BIAS, GELU, WIDTH_2)
    if WIDTH_3:
        _store(acc_3, inverse, bias, out, m, third, rows, N, BIAS, GELU, WIDTH_3)


def project_gated(stream: Stream, weight: torch.Tensor, bias: torch.Tensor | None, gelu: bool, tile: Tile) -> torch.Tensor:
    """See `outrider.kernels.skinny_gemm.project_gated`; `tile.block_n` has at most three bits set."""
    x, sums = stream.scaled, stream.sums
    (rows, columns), size = x.shape, weight.shape[0] // 2
    out = _launch.empty((rows, size), x.dtype, x.device)
    if rows == 0:
        return out
    widths = _widths(tile.block_n)
    pairs = weight.view(2, size, columns)
    parts = 1 if sums is None else sums.shape[0]
    with _launch.on_device_of(x):
        _gated_tiles[(_launch.ceil_div(rows, tile.block_m), _launch.ceil_div(size, tile.block_n))](
            tiles_of(x, tile.block_m, tile.block_k), *(tiles_of(pairs, width or widths[0], tile.block_k) for width in widths), out,
            out if bias is None else bias, out if sums is None else sums, rows, size, columns, parts, stream.eps,
            BIAS=bias is not None, NORMED=sums is not None, GELU=gelu, PARTS=_launch.next_power_of_2(parts),
            WIDEN=not isinstance(_gated_tiles, triton.JITFunction), BLOCK_M=tile.block_m, WIDTH=widths[0], WIDTH_2=widths[1],
            WIDTH_3=widths[2], BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages, **_launch.dependent(x),
        )  # fmt: skip
    return out


def _widths(block_n: int) -> tuple[int, int, int]:
    """Return the powers of two that `block_n` is the sum of, largest first; 0 where there are fewer."""
    widths = [1 << bit for bit in reversed(range(block_n.bit_length())) if block_n >> bit & 1]
    assert len(widths) <= _PIECES, f"a tile of {block_n} pairs has more than {_PIECES} pieces"
    first, second, third = (*widths, 0, 0)[:_PIECES]
    return first, second, third
