"""skinny_gemm in Triton; the contract is in the package's docstring.

The weight is the left operand of the dot, so that its rows fill the tensor core's 64 and the few activations its narrow side. With SPLIT
above 1 each program sums a part of the columns and leaves fp32 partial sums; whoever reads them adds them in order, so results do not
depend on timing. WIDEN is set under the interpreter, whose dot takes the bits of a bf16 for an integer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.silu_mul.triton import gate
from outrider.kernels.skinny_gemm.types import Epilogue, Method, Tile
from outrider.kernels.stream import Stream


@triton.jit
def _inverse_rms(sums, m, rows, parts, width, eps, PARTS: tl.constexpr):
    """Return 1 / sqrt(mean square + eps) of rows m ``[M]`` from their partial sums ``[parts, rows]``."""
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & (m < rows)[None, :]
    total = tl.sum(tl.load(sums + part[:, None] * rows + m[None, :], mask=inside, other=0.0), 0)
    return tl.rsqrt(total / width + eps)


@triton.jit
def _dot_tiles(
    x, weight, out, bias, residual, norm_weight, scaled, sums,
    rows, N, K, x_row, residual_row, out_row, steps, parts, eps,
    EPILOGUE: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n, m, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
    n_row, m_row = n.to(tl.int64) * K, m.to(tl.int64) * x_row
    weights, xs = weight + n_row[:, None] + k[None, :], x + m_row[None, :] + k[:, None]
    ups = weight + (n + N).to(tl.int64)[:, None] * K + k[None, :]
    real_n, real_m = n < N, m < rows
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(steps):
        if EVEN:
            left = tl.load(weights, eviction_policy="evict_first")
            right = tl.load(xs, mask=real_m[None, :], other=0.0)
        else:
            real_k = k + step * BLOCK_K < K
            left = tl.load(weights, mask=real_n[:, None] & real_k[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(xs, mask=real_m[None, :] & real_k[:, None], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        if EPILOGUE == 2:
            if EVEN:
                left = tl.load(ups, eviction_policy="evict_first")
            else:
                left = tl.load(ups, mask=real_n[:, None] & real_k[None, :], other=0.0, eviction_policy="evict_first")
            if WIDEN:
                left = left.to(tl.float32)
            up_acc = tl.dot(left, right, up_acc, input_precision="ieee")
            ups += BLOCK_K
        weights += BLOCK_K
        xs += BLOCK_K
    element = real_n[:, None] & real_m[None, :]
    m64 = m.to(tl.int64)
    if EPILOGUE == 0:
        if PDL:
            gdc_launch_dependents()
        place = (split * rows + m64)[None, :] * N + n[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=element)
    if EPILOGUE == 1:
        if BIAS:
            acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        acc += tl.load(residual + m64[None, :] * residual_row + n[:, None], mask=element, other=0.0).to(tl.float32)
        total = acc.to(out.dtype.element_ty)
        kept = total.to(tl.float32)
        norm = tl.load(norm_weight + n, mask=real_n, other=0.0).to(tl.float32)
        square = tl.sum(tl.where(element, kept * kept, 0.0), 0)
        if PDL:
            gdc_launch_dependents()
        tl.store(out + m64[None, :] * out_row + n[:, None], total, mask=element)
        tl.store(scaled + m64[None, :] * N + n[:, None], (kept * norm[:, None]).to(scaled.dtype.element_ty), mask=element)
        tl.store(sums + tile * rows + m, square, mask=real_m)
    if EPILOGUE == 2:
        if NORMED:
            inverse = _inverse_rms(sums, m, rows, parts, K, eps, PARTS)
            acc, up_acc = acc * inverse[None, :], up_acc * inverse[None, :]
        if BIAS:
            acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
            up_acc += tl.load(bias + N + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        result = gate(acc, GELU) * up_acc
        if PDL:
            gdc_launch_dependents()
        tl.store(out + m64[None, :] * N + n[:, None], result.to(out.dtype.element_ty), mask=element)


@triton.jit
def _sum_rows(
    x, weight, out, bias, residual, norm_weight, scaled, sums,
    N, K, x_row, residual_row, out_row, parts, eps,
    ROWS: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    real_n, real_k = n < N, k < K
    weights = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:  # weights are never written, so they are asked for before the wait
        left = tl.load(weights, eviction_policy="evict_first")
    else:
        left = tl.load(weights, mask=real_n[:, None] & real_k[None, :], other=0.0, eviction_policy="evict_first")
    if EPILOGUE == 2:
        ups = weight + (n + N).to(tl.int64)[:, None] * K + k[None, :]
        if EVEN:
            up_left = tl.load(ups, eviction_policy="evict_first")
        else:
            up_left = tl.load(ups, mask=real_n[:, None] & real_k[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    for m in tl.static_range(ROWS):
        row = tl.load(x + m * x_row + k, mask=real_k, other=0.0).to(tl.float32)
        acc = tl.sum(left.to(tl.float32) * row[None, :], 1)
        if EPILOGUE == 0:
            if PDL and m == ROWS - 1:
                gdc_launch_dependents()
            tl.store(out + m * N + n, acc.to(out.dtype.element_ty), mask=real_n)
        if EPILOGUE == 1:
            if BIAS:
                acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)
            acc += tl.load(residual + m * residual_row + n, mask=real_n, other=0.0).to(tl.float32)
            total = acc.to(out.dtype.element_ty)
            kept = total.to(tl.float32)
            norm = tl.load(norm_weight + n, mask=real_n, other=0.0).to(tl.float32)
            square = tl.sum(tl.where(real_n, kept * kept, 0.0), 0)
            if PDL and m == ROWS - 1:
                gdc_launch_dependents()
            tl.store(out + m * out_row + n, total, mask=real_n)
            tl.store(scaled + m * N + n, (kept * norm).to(scaled.dtype.element_ty), mask=real_n)
            tl.store(sums + tile * ROWS + m, square)
        if EPILOGUE == 2:
            up_acc = tl.sum(up_left.to(tl.float32) * row[None, :], 1)
            if NORMED:
                part = tl.arange(0, PARTS)
                square = tl.sum(tl.load(sums + part * ROWS + m, mask=part < parts, other=0.0), 0)
                inverse = tl.rsqrt(square / K + eps)
                acc, up_acc = acc * inverse, up_acc * inverse
            if BIAS:
                acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)
                up_acc += tl.load(bias + N + n, mask=real_n, other=0.0).to(tl.float32)
            result = gate(acc, GELU) * up_acc
            if PDL and m == ROWS - 1:
                gdc_launch_dependents()
            tl.store(out + m * N + n, result.to(out.dtype.element_ty), mask=real_n)


def project(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """See `outrider.kernels.skinny_gemm.project`."""
    rows, out_features = x.shape[0], weight.shape[0]
    if tile.splits > 1:
        out = _launch.empty((tile.splits, rows, out_features), torch.float32, x.device)
    else:
        out = _launch.empty((rows, out_features), x.dtype, x.device)
    _run(Epilogue.PLAIN, x, weight, tile, out=out, out_features=out_features)
    return out


def project_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    out: torch.Tensor | None, tile: Tile,
) -> Stream:  # fmt: skip
    """See `outrider.kernels.skinny_gemm.project_add`; the tile has one split."""
    rows, width = residual.shape
    total = _launch.empty((rows, width), x.dtype, x.device) if out is None else out
    scaled = _launch.empty((rows, width), x.dtype, x.device)
    sums = _launch.empty((_launch.ceil_div(width, tile.block_n), rows), torch.float32, x.device)
    _run(
        Epilogue.ADD, x, weight, tile, out=total, out_features=width, bias=bias, residual=residual, norm_weight=norm_weight,
        scaled=scaled, sums=sums,
    )  # fmt: skip
    return Stream(total, scaled, sums, eps)


def project_gated(stream: Stream, weight: torch.Tensor, bias: torch.Tensor | None, gelu: bool, tile: Tile) -> torch.Tensor:
    """See `outrider.kernels.skinny_gemm.project_gated`."""
    out = _launch.empty((stream.scaled.shape[0], weight.shape[0] // 2), stream.scaled.dtype, stream.scaled.device)
    _run(
        Epilogue.GATED, stream.scaled, weight, tile, out=out, out_features=out.shape[1], bias=bias, sums=stream.sums,
        normed=stream.sums is not None, eps=stream.eps, gelu=gelu,
    )  # fmt: skip
    return out


def _run(
    epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor, tile: Tile, *, out: torch.Tensor,
    out_features: int, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, norm_weight: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None, sums: torch.Tensor | None = None, normed: bool = False, eps: float = 0.0, gelu: bool = False,
) -> None:  # fmt: skip
    rows, columns = x.shape
    if rows == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    late = _launch.dependent(x)
    parts = sums.shape[0] if normed and sums is not None else 1
    blocks = _launch.ceil_div(out_features, tile.block_n)
    arguments = (
        x, weight, out, weight if bias is None else bias, x if residual is None else residual, x if norm_weight is None else norm_weight,
        x if scaled is None else scaled, x if sums is None else sums,
    )  # fmt: skip
    residual_row = 0 if residual is None else residual.stride(0)
    flags = {
        "EPILOGUE": epilogue.value, "BIAS": bias is not None, "NORMED": normed, "GELU": gelu, "PARTS": _launch.next_power_of_2(parts),
        "BLOCK_N": tile.block_n, "num_warps": tile.warps,
    }  # fmt: skip
    with _launch.on_device_of(x):
        if tile.method is Method.SUM:
            block_k = _launch.next_power_of_2(columns)
            even = block_k == columns and out_features % tile.block_n == 0
            _sum_rows[(blocks,)](
                *arguments, out_features, columns, x.stride(0), residual_row, out.stride(0), parts, eps,
                ROWS=rows, EVEN=even, BLOCK_K=block_k, **flags, **late,
            )  # fmt: skip
            return
        steps = _launch.ceil_div(columns, tile.block_k * tile.splits)
        even = columns == steps * tile.block_k * tile.splits and out_features % tile.block_n == 0
        _dot_tiles[(blocks, tile.splits)](
            *arguments, rows, out_features, columns, x.stride(0), residual_row, out.stride(-2), steps, parts, eps,
            SPLIT=tile.splits, EVEN=even, WIDEN=not isinstance(_dot_tiles, triton.JITFunction), BLOCK_M=block_rows(rows),
            BLOCK_K=tile.block_k, num_stages=tile.stages, **flags, **late,
        )  # fmt: skip


def block_rows(rows: int) -> int:
    """Return to how many rows a product of so many is padded."""
    return max(16, _launch.next_power_of_2(rows))
