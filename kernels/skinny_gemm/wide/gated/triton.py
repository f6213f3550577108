"""Triton kernel of an MLP's gate-up product with activation (`project_gated`), for about 65 to 512 rows.

A program computes pairs of outputs. The weight's gate rows and value rows are loaded as one operand.
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
from outrider.kernels.stream import ResidualStream


@triton.jit(do_not_specialize=("rows", "parts"))
def _gated_tiles(
    x, weight, out, bias, sums, rows, N, K, parts, eps,
    BIAS: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        left = x.load([first_m, step * BLOCK_K])
        right = weight.load([0, first_n, step * BLOCK_K]).reshape(2 * BLOCK_N, BLOCK_K)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    if PDL:  # here, the compiler needs 168 registers; before the stores, it would need 241
        gdc_launch_dependents()
    low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    if NORMED:
        part = tl.arange(0, PARTS)
        inside = (m < rows)[:, None] & (part < parts)[None, :]
        square = tl.sum(tl.load(sums + part[None, :] * rows + m[:, None], mask=inside, other=0.0), 1)
        inverse = tl.rsqrt(square / K + eps)[:, None]
        low *= inverse
        high *= inverse
    if BIAS:
        low += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        high += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    result = gate(low, GELU) * high
    element = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=element)


def project_gated(
    stream: ResidualStream, weight: torch.Tensor, bias: torch.Tensor | None, gelu: bool, tile: Tile
) -> torch.Tensor:
    x, sums = stream.scaled, stream.sums
    (rows, columns), size = x.shape, weight.shape[0] // 2
    out = _launch.empty((rows, size), x.dtype, x.device)
    if rows == 0:
        return out
    parts = 1 if sums is None else sums.shape[0]
    with _launch.on_device_of(x):
        _gated_tiles[(_launch.ceil_div(rows, tile.block_m), _launch.ceil_div(size, tile.block_n))](
            tiles_of(x, tile.block_m, tile.block_k),
            tiles_of(weight.view(2, size, columns), tile.block_n, tile.block_k), out,
            out if bias is None else bias, out if sums is None else sums, rows, size, columns, parts,
            stream.eps,
            BIAS=bias is not None, NORMED=sums is not None, GELU=gelu, PARTS=_launch.next_power_of_2(parts),
            WIDEN=not isinstance(_gated_tiles, triton.JITFunction), BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages,
            **_launch.dependent(x),
        )  # fmt: skip
    return out
