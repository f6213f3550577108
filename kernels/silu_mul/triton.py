"""Triton version of silu_mul: a program handles a block of one row.

`kernels.silu_mul` documents the op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.stream import ResidualStream

_BLOCK = 1024


@triton.jit
def gate(value, GELU: tl.constexpr):
    """Return silu of a block, or gelu in its tanh form."""
    if GELU:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z); the factor is 2 * sqrt(2 / pi).
        return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    return value * tl.sigmoid(value)


@triton.jit
def _silu_mul(
    parts, bias, sums, out, rows, size, width, sum_parts, eps,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr, GELU: tl.constexpr,
    SUM_PARTS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        gdc_wait()
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        base = parts + (split * rows + row) * 2 * size + column
        low += tl.load(base, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(base + size, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        part = tl.arange(0, SUM_PARTS)
        square = tl.sum(tl.load(sums + part * rows + row, mask=part < sum_parts, other=0.0), 0)
        inverse = tl.rsqrt(square / width + eps)
        low, high = low * inverse, high * inverse
    if BIAS:
        low += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + size + column, mask=inside, other=0.0).to(tl.float32)
    result = gate(low, GELU) * high
    if PDL:
        gdc_launch_dependents()
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)


def silu_mul(
    parts: torch.Tensor,
    stream: ResidualStream | None,
    bias: torch.Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, size = parts.shape[-2], parts.shape[-1] // 2
    out = _launch.empty((rows, size), dtype, parts.device)
    if rows == 0:
        return out
    sums = None if stream is None else stream.sums
    late = _launch.dependent(parts)
    sum_parts = 1 if sums is None else sums.shape[0]
    block = min(_BLOCK, _launch.next_power_of_2(size))
    with _launch.on_device_of(parts):
        _silu_mul[(_launch.ceil_div(size, block), rows)](
            parts, out if bias is None else bias, out if sums is None else sums, out, rows, size,
            1 if stream is None else stream.scaled.shape[1], sum_parts, 0.0 if stream is None else stream.eps,
            SPLITS=parts.shape[0] if parts.dim() == 3 else 1, BIAS=bias is not None, NORMED=sums is not None,
            GELU=gelu, SUM_PARTS=_launch.next_power_of_2(sum_parts), BLOCK=block, num_warps=4, **late,
        )  # fmt: skip
    return out
