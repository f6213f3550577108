"""Triton version of add_norm. `kernels.add_norm` documents the ops.

A program handles a whole row if there are enough rows to fill the device. Otherwise, it handles a block of
columns of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.stream import FEW_ROWS, MANY_ROWS, ResidualStream, normed_on_write

_BLOCK = 512
_TILE_ROWS = 128
"""Products of up to `MANY_ROWS` rows read normed rows in tiles of this many rows. Whole tiles are faster."""


# The number of rows is only compared with row numbers. A specialised kernel would be no faster.
@triton.jit(do_not_specialize=["rows"])
def _stream_rows(
    parts, residual, tokens, bias, norm_weight, out, scaled, sums,
    rows, width, residual_row, out_row, scaled_row, eps,
    SPLITS: tl.constexpr, EMBED: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width) & (row < rows)
    norm = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:  # the norm's weight is loaded before the wait, because no kernel writes weights
        gdc_wait()
    source = row
    if EMBED:
        source = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)
    total = tl.load(residual + source * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * rows + row) * width + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    kept = total.to(scaled.dtype.element_ty)
    total = kept.to(tl.float32)  # the norm applies to the rounded residual
    square = tl.sum(total * total, 0)
    normed = total * norm
    if WHOLE:
        normed = normed * tl.rsqrt(square / width + eps)
    if PDL:
        gdc_launch_dependents()
    if KEEP:
        tl.store(out + row * out_row + column, kept, mask=inside)
    tl.store(scaled + row * scaled_row + column, normed.to(scaled.dtype.element_ty), mask=inside)
    if not WHOLE:
        tl.store(sums + block * rows + row, square, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _divide(
    scaled, sums, out, rows, width, parts, eps,
    PARTS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column, part = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    inside = column < width
    if PDL:
        gdc_wait()
    total = tl.sum(tl.load(sums + part * rows + row, mask=part < parts, other=0.0), 0)
    value = tl.load(scaled + row * width + column, mask=inside, other=0.0).to(tl.float32) * tl.rsqrt(
        total / width + eps
    )
    if PDL:
        gdc_launch_dependents()
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def add_sums(
    parts: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    bias: torch.Tensor | None, out: torch.Tensor | None
) -> ResidualStream:  # fmt: skip
    total = _launch.empty(tuple(residual.shape), residual.dtype, residual.device) if out is None else out
    splits = parts.shape[0] if parts.dim() == 3 else 1
    return _stream(residual, None, parts, splits, bias, norm_weight, eps, total)


def embed_rows(
    tokens: torch.Tensor, table: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> ResidualStream:
    out = _launch.empty((tokens.shape[0], table.shape[1]), table.dtype, table.device)
    return _stream(table, tokens.contiguous(), None, 0, None, norm_weight, eps, out)


def _stream(
    source: torch.Tensor, tokens: torch.Tensor | None, parts: torch.Tensor | None, splits: int,
    bias: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, out: torch.Tensor
) -> ResidualStream:  # fmt: skip
    rows, width = out.shape
    whole = normed_on_write(rows, out.dtype)
    # Allocate whole tiles, so that products that read these rows in tiles stay inside the allocation.
    kept = _launch.ceil_div(rows, _TILE_ROWS) * _TILE_ROWS if FEW_ROWS < rows <= MANY_ROWS else rows
    scaled = _launch.empty((kept, width), out.dtype, out.device)[:rows]
    sums = (
        None
        if whole
        else _launch.empty((_launch.ceil_div(width, _block(width, whole)), rows), torch.float32, out.device)
    )
    _launch_rows(source, tokens, parts, splits, bias, norm_weight, eps, out, scaled, sums)
    return ResidualStream(out, scaled, sums, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    normed = _launch.empty(tuple(x.shape), x.dtype, x.device) if out is None else out
    _launch_rows(x, None, None, 0, None, weight, eps, None, normed, None)
    return normed


def _launch_rows(
    source: torch.Tensor, tokens: torch.Tensor | None, parts: torch.Tensor | None, splits: int,
    bias: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None,
    scaled: torch.Tensor, sums: torch.Tensor | None,
) -> None:  # fmt: skip
    rows, width = scaled.shape
    if rows == 0:
        return
    whole = sums is None
    block = _block(width, whole)
    blocks = _launch.ceil_div(width, block)
    warps = max(1, min(8, block // 256))
    late = _launch.dependent(scaled)
    source = source if source.stride(1) == 1 else source.contiguous()
    with _launch.on_device_of(scaled):
        _stream_rows[(blocks, rows)](
            source if parts is None else parts, source, norm_weight if tokens is None else tokens,
            norm_weight if bias is None else bias, norm_weight, scaled if out is None else out, scaled,
            scaled if sums is None else sums, rows, width, source.stride(0),
            0 if out is None else out.stride(0), scaled.stride(0), eps,
            SPLITS=splits, EMBED=tokens is not None, BIAS=bias is not None, WHOLE=whole, KEEP=out is not None,
            BLOCK=block, num_warps=warps, **late,
        )  # fmt: skip


def normalise(stream: ResidualStream) -> torch.Tensor:
    assert stream.sums is not None
    rows, width = stream.scaled.shape
    out = _launch.empty((rows, width), stream.scaled.dtype, stream.scaled.device)
    if rows == 0:
        return out
    late = _launch.dependent(out)
    parts, block = stream.sums.shape[0], _block(width, False)
    with _launch.on_device_of(out):
        _divide[(_launch.ceil_div(width, block), rows)](
            stream.scaled, stream.sums, out, rows, width, parts, stream.eps,
            PARTS=_launch.next_power_of_2(parts), BLOCK=block, num_warps=2, **late,
        )  # fmt: skip
    return out


def _block(width: int, whole: bool) -> int:
    """Return the number of columns that one program handles."""
    return _launch.next_power_of_2(width) if whole else min(_BLOCK, _launch.next_power_of_2(width))
