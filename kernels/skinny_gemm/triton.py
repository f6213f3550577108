"""Triton version of skinny_gemm. `kernels.skinny_gemm` documents the ops.

Operands: the weight is the left operand of the product (`tl.dot`). The weight's rows fill the tensor core's
64 rows, and the few rows of x form the narrow side.

Splits: with SPLIT > 1, each program sums a part of the columns and stores fp32 partial sums. The next kernel,
or the program that finishes last, adds the partial sums in order. Results therefore do not depend on timing.

FP8: for a product with an FP8 weight, a separate launch converts x to FP8. Both operands then move from
shared memory to the tensor cores unchanged. Widening the weight in registers measured slower than reading a
bf16 weight. Tensor cores accumulate FP8 products in few bits. The kernel therefore adds their result to an
fp32 sum after each BLOCK_K columns. The kernels in `rows`, for 1 to 4 rows, do not convert x.

The constant WIDEN converts x to fp32. It is set only under Triton's interpreter, which would read the bits of
a bf16 operand as an integer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.quantize_rows.triton import quantize_rows
from outrider.kernels.rope_store.types import Lookup
from outrider.kernels.skinny_gemm.epilogue.triton import (
    entries,
    finish,
    load_constants,
    load_rows,
    look_up,
    tile_rows,
)
from outrider.kernels.skinny_gemm.rows.triton import stay_rows, sum_rows
from outrider.kernels.skinny_gemm.types import Epilogue, Method, Overlap, Rotary, Tile
from outrider.kernels.stream import ResidualStream


@triton.jit
def _dot_tiles(
    x, weight, out, bias, scales, row_scales, residual, norm_weight, scaled, sums, cos, sin, slots, k_plane,
    v_plane, table, index, partials, arrivals, rows, N, K, second, x_row, residual_row, out_row, table_row,
    steps, parts, eps,
    EPILOGUE: tl.constexpr, SPLIT: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, ROW_SCALED: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    LOOKUP: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
    FETCH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    m, k = tl.arange(0, BLOCK_M), split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    row, n = tile_rows(tile, second, EPILOGUE, HALF, BLOCK_N)
    weights, xs = weight + row[:, None] * K + k[None, :], x + (m.to(tl.int64) * x_row)[None, :] + k[:, None]
    real_n, real_m = n < N, m < rows
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    constants = load_constants(output, N, second, bias, scales, norm_weight, EPILOGUE, BIAS, SCALED, HALF)
    # 1. Load everything that no kernel writes, then wait for the previous kernel.
    if FETCH > 0:  # prefetch the first columns of the weight into L2 before waiting
        tl.inline_asm_elementwise(
            "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
            [(weight + row * K + split * steps * BLOCK_K).to(tl.int64), FETCH], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    begin = entries(m, rows, table_row, index, LOOKUP)
    found = look_up(begin, m, output, rows, N, second, table, EPILOGUE, HALF, LOOKUP)
    # 2. Multiply.
    acc = tl.zeros((row.shape[0], BLOCK_M), tl.float32)
    for step in range(steps):
        if EVEN:
            left = tl.load(weights, eviction_policy="evict_first")
            right = tl.load(xs, mask=real_m[None, :], other=0.0)
        else:
            real_k = k + step * BLOCK_K < K
            left = tl.load(
                weights, mask=real_n[:, None] & real_k[None, :], other=0.0, eviction_policy="evict_first"
            )
            right = tl.load(xs, mask=real_m[None, :] & real_k[:, None], other=0.0)
        if WIDEN:
            right = right.to(tl.float32)
        acc = tl.dot(left.to(right.dtype), right, acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
        weights += BLOCK_K
        xs += BLOCK_K
    factor, before = load_rows(
        m, output, rows, N, K, row_scales, sums, residual, residual_row, parts, eps, EPILOGUE, ROW_SCALED,
        NORMED, PARTS
    )  # fmt: skip
    # 3. With splits: store this part; for ADD, the last program adds all parts.
    last = split >= 0
    if GATHER:  # the program that ends last adds all parts of the tile, in the order of the splits
        place = partials + m.to(tl.int64)[None, :] * N + output[:, None]
        element = (output < N)[:, None] & real_m[None, :]
        stride = rows * N
        tl.store(place + split * stride, acc, mask=element)
        tl.debug_barrier()  # all threads must have stored before one of them signals it
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            tl.store(arrivals + tile, 0)  # ready for the next launch
            acc = tl.load(place, mask=element, other=0.0, cache_modifier=".cg")
            for nth in tl.static_range(1, SPLIT):
                acc += tl.load(place + nth * stride, mask=element, other=0.0, cache_modifier=".cg")
    elif SPLIT > 1:
        out += split.to(tl.int64) * rows * N
    # 4. Apply the epilogue.
    if last:
        finish(
            acc, m, tile, constants, factor, before, found, out, scaled, sums, cos, sin, slots, k_plane,
            v_plane, rows, N, out_row, EPILOGUE, BIAS, SCALED, GELU, HEADS, KV_HEADS, HALF, LOOKUP, PDL,
            BLOCK_N
        )  # fmt: skip


def project(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, tile: Tile,
    stream: ResidualStream | None = None
) -> torch.Tensor:  # fmt: skip
    """Compute `outrider.kernels.skinny_gemm.project`.

    With `stream`, compute `project_normed`. In this case, x contains the rows of the stream.
    """
    rows, out_features = x.shape[0], weight.shape[0]
    split = tile.splits > 1
    shape = (tile.splits, rows, out_features) if split else (rows, out_features)
    out = _launch.empty(shape, torch.float32 if split else x.dtype, x.device)
    tail = _Tail(out, out_features, scales=scales)
    if stream is not None:
        tail = replace(tail, sums=stream.sums, normed=True, eps=stream.eps)
    _run(Epilogue.PLAIN, x, weight, tile, tail)
    return out


def project_add(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None, tile: Tile,
) -> ResidualStream:  # fmt: skip
    """Compute `outrider.kernels.skinny_gemm.project_add`. A tile with splits requires `can_gather`."""
    rows, width = residual.shape
    total = _launch.empty((rows, width), x.dtype, x.device) if out is None else out
    scaled = _launch.empty((rows, width), x.dtype, x.device)
    sums = _launch.empty((_launch.ceil_div(width, tile.block_n), rows), torch.float32, x.device)
    tail = _Tail(
        total,
        width,
        bias=bias,
        scales=scales,
        residual=residual,
        norm_weight=norm_weight,
        scaled=scaled,
        sums=sums,
    )
    _run(Epilogue.ADD, x, weight, tile, tail)
    return ResidualStream(total, scaled, sums, eps)


def project_gated(
    stream: ResidualStream,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    gelu: bool,
    tile: Tile,
) -> torch.Tensor:
    rows, size = stream.scaled.shape[0], weight.shape[0] // 2
    out = _launch.empty((rows, size), stream.scaled.dtype, stream.scaled.device)
    tail = _Tail(
        out,
        size,
        second=size,
        bias=bias,
        scales=scales,
        sums=stream.sums,
        normed=stream.sums is not None,
        eps=stream.eps,
    )
    _run(Epilogue.GATED, stream.scaled, weight, tile, tail, gelu=gelu)
    return out


def project_rotated(
    stream: ResidualStream, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None,
    rotary: Rotary, lookup: Lookup | None, tile: Tile,
) -> torch.Tensor:  # fmt: skip
    """Compute `outrider.kernels.skinny_gemm.project_rotated`. The tile has one split."""
    kv_heads, dim = rotary.k_plane.shape[2:]
    rows, pairs = stream.scaled.shape[0], weight.shape[0] // 2
    heads = weight.shape[0] // dim - 2 * kv_heads
    out = _launch.empty((rows, heads, dim), rotary.cos.dtype, stream.scaled.device)
    tail = _Tail(
        out, pairs, second=dim // 2, bias=bias, scales=scales, sums=stream.sums,
        normed=stream.sums is not None, eps=stream.eps, rotary=rotary, lookup=lookup,
    )  # fmt: skip
    _run(Epilogue.ROTATED, stream.scaled, weight, tile, tail, heads=heads, kv_heads=kv_heads, half=dim // 2)
    return out


@dataclass(frozen=True, slots=True)
class _Tail:
    """Tensors that the epilogue reads or writes, and the epilogue's constants; see `finish`."""

    out: torch.Tensor
    count: int  # number of outputs, or of pairs of outputs
    second: int = 0  # distance between the weight rows of a pair
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    scaled: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    normed: bool = False
    eps: float = 0.0
    rotary: Rotary | None = None
    lookup: Lookup | None = None


def _run(
    epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor, tile: Tile, tail: _Tail, *, gelu: bool = False,
    heads: int = 0, kv_heads: int = 0, half: int = 1,
) -> None:  # fmt: skip
    # 1. Collect the arguments that all kernels share.
    rows, columns = x.shape
    if rows == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    out, rotary, lookup = tail.out, tail.rotary, tail.lookup
    parts = tail.sums.shape[0] if tail.normed and tail.sums is not None else 1
    blocks = _launch.ceil_div(tail.count, tile.block_n)
    row_scales = None
    if tail.scales is not None and tile.method is Method.DOT:
        x, row_scales = quantize_rows(x)
    optional = (tail.residual, tail.norm_weight, tail.scaled, tail.sums)
    gathers = tile.splits > 1 and epilogue is Epilogue.ADD
    turned = (rotary.cos, rotary.sin, rotary.slots, rotary.k_plane, rotary.v_plane) if rotary else (x,) * 5
    scales = (tail.scales, row_scales) if tile.method is Method.DOT else (tail.scales,)
    found = (lookup.table, lookup.index) if lookup else (x, x)
    tensors = (
        x,
        weight,
        out,
        *(x if tensor is None else tensor for tensor in (tail.bias, *scales, *optional)),
        *turned,
        *found,
    )
    strides = (
        x.stride(0), 0 if tail.residual is None else tail.residual.stride(0), out.stride(-2),
        lookup.table.stride(0) if lookup else 0
    )  # fmt: skip
    flags = {
        "EPILOGUE": epilogue.value, "BIAS": tail.bias is not None, "SCALED": tail.scales is not None,
        "NORMED": tail.normed, "GELU": gelu, "PARTS": _launch.next_power_of_2(parts), "HEADS": heads,
        "KV_HEADS": kv_heads, "HALF": half, "LOOKUP": lookup is not None, "BLOCK_N": tile.block_n,
        "num_warps": tile.warps, **_launch.dependent(x),
    }  # fmt: skip
    # 2. Launch. Step 1 passes x in place of absent tensors, which the kernels never read.
    with _launch.on_device_of(x):
        if tile.method is not Method.DOT:
            block_k = _launch.next_power_of_2(columns)
            flags |= {
                "EVEN": block_k == columns,
                "EARLY": tile.overlap is not Overlap.LATE,
                "BLOCK_K": block_k,
            }
            sizes = (tail.count, columns, tail.second, *strides, parts, tail.eps)
            if tile.method is Method.SUM:
                sum_rows[(blocks,)](*tensors, *sizes, ROWS=rows, **flags)
            elif rows == 1:
                programs = min(blocks, tile.programs)
                # The interpreter cannot run inline assembly. Words need row sizes and addresses that are
                # multiples of 16 bytes.
                compiled = isinstance(stay_rows, triton.JITFunction)
                words = (
                    compiled and weight.element_size() == 1 and not (columns % 16 or weight.data_ptr() % 16)
                )
                tensors = (x, weight.view(torch.int64) if words else weight, *tensors[2:])
                stay_rows[(programs,)](*tensors, *sizes, programs, BYTES=words, **flags)
            else:
                raise ValueError(f"x has {rows} rows; a tile of method STAY computes one row")
            return
        gathered = (x, x)
        if gathers:
            gathered = (
                _launch.empty((tile.splits, rows, tail.count), torch.float32, x.device),
                _arrivals(weight),
            )
        steps = _launch.ceil_div(columns, tile.block_k * tile.splits)
        even = columns == steps * tile.block_k * tile.splits and tail.count % tile.block_n == 0
        fetches = tile.overlap is Overlap.FETCH and even and flags["PDL"] and weight.data_ptr() % 16 == 0
        _dot_tiles[(blocks, tile.splits)](
            *tensors, *gathered, rows, tail.count, columns, tail.second, *strides, steps, parts, tail.eps,
            SPLIT=tile.splits, EVEN=even, GATHER=gathers, EARLY=tile.overlap is not Overlap.LATE,
            FETCH=_FETCHED if fetches else 0, ROW_SCALED=row_scales is not None,
            WIDEN=not isinstance(_dot_tiles, triton.JITFunction), BLOCK_M=block_rows(rows),
            BLOCK_K=tile.block_k, num_stages=tile.stages, **flags,
        )  # fmt: skip


_ARRIVALS: dict[tuple[torch.device, int], torch.Tensor] = {}
_MOST_TILES = 1024
_FETCHED = 512  # bytes of each weight row that are prefetched


def can_gather(weight: torch.Tensor, tile: Tile) -> bool:
    """Return whether the counters of finished programs are available for a weight.

    The counters are allocated on the first call with a weight. That call must not happen while a CUDA graph
    is captured.
    """
    few = tile.method is Method.DOT and _launch.ceil_div(weight.shape[0], tile.block_n) <= _MOST_TILES
    made = (weight.device, weight.data_ptr()) in _ARRIVALS
    return few and (made or not (weight.is_cuda and torch.cuda.is_current_stream_capturing()))


def _arrivals(weight: torch.Tensor) -> torch.Tensor:
    """Return the counters of finished programs, one for each tile of a weight.

    Between products, all counters are zero. Each weight has its own counters, because products with different
    weights may overlap. Products with the same weight run one after the other.
    """
    key = (weight.device, weight.data_ptr())
    if key not in _ARRIVALS:
        _ARRIVALS[key] = torch.zeros(_MOST_TILES, dtype=torch.int32, device=weight.device)
    return _ARRIVALS[key]


def block_rows(rows: int) -> int:
    """Return the number of rows that a product of `rows` rows is padded to."""
    return max(16, _launch.next_power_of_2(rows))
