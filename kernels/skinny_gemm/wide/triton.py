"""Triton kernels of products of about 65 to 512 rows, fused with the next operation of a decoder layer.

`kernels.skinny_gemm` documents the ops.

The rows of x fill the tensor core's 64 rows, and the weight is the wide operand. The tensor memory
accelerator loads the tiles of both operands, without registers and masks. Rows and columns outside a matrix
are read as zeros. Programs that use the same part of the weight are adjacent in launch order. This part is
therefore read from memory only once.

SPLITS works as in the kernels for few rows: programs store fp32 partial sums, which the next kernel adds.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.skinny_gemm.types import Epilogue, Rotary, Tile
from outrider.kernels.skinny_gemm.wide.maps import can_map, tiles_of
from outrider.kernels.stream import ResidualStream


@triton.jit(do_not_specialize=("rows", "parts"))
def _wide_tiles(
    x, weight, out, bias, residual, norm_weight, scaled, sums, cos, sin, slots, k_plane, v_plane, rows, N, K,
    residual_row, out_row, parts, eps,
    EPILOGUE: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    tile_m, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    COLUMNS: tl.constexpr = 2 * BLOCK_N if EPILOGUE == 3 else BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    m64 = m.to(tl.int64)
    real_m, real_n = m < rows, n < N
    element = real_m[:, None] & real_n[None, :]
    if PDL:
        gdc_wait()
    # 1. Multiply.
    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        left = x.load([first_m, step * BLOCK_K])
        right = weight.load([tile_n * COLUMNS, step * BLOCK_K])
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    # 2. Separate pairs, divide by the root mean square, add the bias.
    low = acc
    high = acc
    if EPILOGUE == 3:
        # The tile holds whole heads: bring the two halves of each head side by side.
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // HALF, 2, HALF)), (0, 1, 3, 2))
        low, high = tl.split(tl.reshape(halves, (BLOCK_M, BLOCK_N, 2)))
    place = (n // HALF) * (2 * HALF) + n % HALF if EPILOGUE == 3 else n
    if NORMED:
        part = tl.arange(0, PARTS)
        inside = real_m[:, None] & (part < parts)[None, :]
        square = tl.sum(tl.load(sums + part[None, :] * rows + m[:, None], mask=inside, other=0.0), 1)
        inverse = tl.rsqrt(square / K + eps)[:, None]
        low *= inverse
        if EPILOGUE == 3:
            high *= inverse
    if BIAS:
        low += tl.load(bias + place, mask=real_n, other=0.0).to(tl.float32)[None, :]
        if EPILOGUE == 3:
            high += tl.load(bias + HALF + place, mask=real_n, other=0.0).to(tl.float32)[None, :]
    # 3. Store according to the epilogue: PLAIN, ADD or ROTATED.
    if EPILOGUE == 0:
        if PDL:
            gdc_launch_dependents()
        target = out + (split * rows + m64)[:, None] * N + n[None, :]
        tl.store(target, low.to(out.dtype.element_ty), mask=element)
    if EPILOGUE == 1:
        norm = tl.load(norm_weight + n, mask=real_n, other=0.0).to(tl.float32)
        low += tl.load(residual + m64[:, None] * residual_row + n[None, :], mask=element, other=0.0).to(
            tl.float32
        )
        total = low.to(out.dtype.element_ty)
        kept = total.to(tl.float32)  # the norm applies to the rounded residual
        square = tl.sum(tl.where(element, kept * kept, 0.0), 1)
        if PDL:
            gdc_launch_dependents()
        tl.store(out + m64[:, None] * out_row + n[None, :], total, mask=element)
        tl.store(
            scaled + m64[:, None] * N + n[None, :],
            (kept * norm[None, :]).to(scaled.dtype.element_ty),
            mask=element,
        )
        tl.store(sums + tile_n * rows + m, square, mask=real_m)
    if EPILOGUE == 3:
        DIM: tl.constexpr = 2 * HALF
        head = n // HALF
        angle = m64[:, None] * DIM + (n % HALF)[None, :]
        cos_low = tl.load(cos + angle, mask=element, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + angle + HALF, mask=element, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=element, other=0.0).to(tl.float32)  # negated by `rope_angles`
        sin_high = tl.load(sin + angle + HALF, mask=element, other=0.0).to(tl.float32)
        new_low = low * cos_low + high * sin_low
        new_high = high * cos_high + low * sin_high
        slot = tl.load(slots + m, mask=real_m, other=-1)
        stored = element & (slot >= 0)[:, None]
        is_query, is_value = (head < HEADS)[None, :], (head >= HEADS + KV_HEADS)[None, :]
        is_key = (head >= HEADS)[None, :] & (head < HEADS + KV_HEADS)[None, :]
        if PDL:
            gdc_launch_dependents()
        query = out + m64[:, None] * (HEADS * DIM) + place[None, :]
        tl.store(query, new_low.to(out.dtype.element_ty), mask=element & is_query)
        tl.store(query + HALF, new_high.to(out.dtype.element_ty), mask=element & is_query)
        key = k_plane + slot[:, None] * (KV_HEADS * DIM) + (place - HEADS * DIM)[None, :]
        tl.store(key, new_low.to(k_plane.dtype.element_ty), mask=stored & is_key)
        tl.store(key + HALF, new_high.to(k_plane.dtype.element_ty), mask=stored & is_key)
        value = v_plane + slot[:, None] * (KV_HEADS * DIM) + (place - (HEADS + KV_HEADS) * DIM)[None, :]
        tl.store(value, low.to(v_plane.dtype.element_ty), mask=stored & is_value)
        tl.store(value + HALF, high.to(v_plane.dtype.element_ty), mask=stored & is_value)


def fits(x: torch.Tensor, weight: torch.Tensor, half: int = 1) -> bool:
    """Return whether the kernels for about 65 to 512 rows can compute a matrix product.

    They need a GPU with tensor maps and enough shared memory. The operands must fit tensor maps, and the head
    size must be a power of two.
    """
    return _has_room(x.device) and can_map(x, weight) and half & (half - 1) == 0


@functools.cache
def _has_room(device: torch.device) -> bool:
    """Return whether a device has tensor maps and enough shared memory for the measured tiles.

    Hopper and the large Blackwell GPUs have both.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def project(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    rows, out_features = x.shape[0], weight.shape[0]
    split = tile.splits > 1
    shape = (tile.splits, rows, out_features) if split else (rows, out_features)
    out = _launch.empty(shape, torch.float32 if split else x.dtype, x.device)
    _run(Epilogue.PLAIN, x, weight, tile, out, out_features)
    return out


def project_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor,
    norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None, tile: Tile,
) -> ResidualStream:  # fmt: skip
    """Compute `outrider.kernels.skinny_gemm.project_add`. The tile has one split."""
    rows, width = residual.shape
    total = _launch.empty((rows, width), x.dtype, x.device) if out is None else out
    scaled = _launch.empty((rows, width), x.dtype, x.device)
    sums = _launch.empty((_launch.ceil_div(width, tile.block_n), rows), torch.float32, x.device)
    _run(
        Epilogue.ADD,
        x,
        weight,
        tile,
        total,
        width,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        scaled=scaled,
        sums=sums,
    )
    return ResidualStream(total, scaled, sums, eps)


def project_rotated(
    stream: ResidualStream, weight: torch.Tensor, bias: torch.Tensor | None, rotary: Rotary, tile: Tile
) -> torch.Tensor:
    """Compute `outrider.kernels.skinny_gemm.project_rotated`.

    The tile has one split and contains whole heads.
    """
    dim = rotary.k_plane.shape[3]
    heads = weight.shape[0] // dim - 2 * rotary.k_plane.shape[2]
    out = _launch.empty((stream.scaled.shape[0], heads, dim), rotary.cos.dtype, stream.scaled.device)
    _run(
        Epilogue.ROTATED, stream.scaled, weight, tile, out, weight.shape[0] // 2, bias=bias, sums=stream.sums,
        eps=stream.eps, rotary=rotary, heads=heads,
    )  # fmt: skip
    return out


def _run(
    epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor, tile: Tile, out: torch.Tensor, count: int, *,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None, scaled: torch.Tensor | None = None,
    sums: torch.Tensor | None = None, eps: float = 0.0, rotary: Rotary | None = None, heads: int = 0,
) -> None:  # fmt: skip
    """Launch the kernel for `count` outputs or pairs.

    The kernel reads `sums`, except with ADD, which writes `sums`.
    """
    rows, columns = x.shape
    if rows == 0:
        return
    normed = sums is not None and epilogue is not Epilogue.ADD
    parts = sums.shape[0] if normed and sums is not None else 1
    kv_heads, dim = rotary.k_plane.shape[2:] if rotary else (0, 2)
    block_m = tile.block_m
    block_n = max(tile.block_n, dim // 2) if rotary else tile.block_n
    optional = (bias, residual, norm_weight, scaled, sums)
    turned = (rotary.cos, rotary.sin, rotary.slots, rotary.k_plane, rotary.v_plane) if rotary else (x,) * 5
    with _launch.on_device_of(x):
        _wide_tiles[(_launch.ceil_div(rows, block_m), _launch.ceil_div(count, block_n), tile.splits)](
            tiles_of(x, block_m, tile.block_k),
            tiles_of(weight, 2 * block_n if rotary else block_n, tile.block_k), out,
            *(x if tensor is None else tensor for tensor in optional), *turned, rows, count, columns,
            0 if residual is None else residual.stride(0), out.stride(-2), parts, eps,
            EPILOGUE=epilogue.value, SPLITS=tile.splits, BIAS=bias is not None, NORMED=normed,
            PARTS=_launch.next_power_of_2(parts), HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2,
            WIDEN=not isinstance(_wide_tiles, triton.JITFunction), BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages, **_launch.dependent(x),
        )  # fmt: skip
