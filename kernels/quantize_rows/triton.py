"""Triton version of quantize_rows: a program handles one row. `kernels.quantize_rows` documents the op.

A program finds the scale of a row and then stores the scaled row. In between, a row of up to `_BLOCK` columns
stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.quantize_rows.reference import FP8, LARGEST

_BLOCK = 16384


@triton.jit
def _quantize_rows(
    x,
    out,
    scales,
    width,
    x_row,
    LARGEST: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * x_row + column, mask=column < width, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(value), 0)
    if not ONCE:
        for first in range(BLOCK, width, BLOCK):
            more = tl.load(x + row * x_row + first + column, mask=first + column < width, other=0.0).to(
                tl.float32
            )
            top = tl.maximum(top, tl.max(tl.abs(more), 0))
    scale = tl.where(top > 0, top / LARGEST, 1.0)
    if PDL:
        gdc_launch_dependents()
    tl.store(scales + row, scale)
    tl.store(out + row * width + column, (value / scale).to(out.dtype.element_ty), mask=column < width)
    if not ONCE:
        for first in range(BLOCK, width, BLOCK):
            inside = first + column < width
            more = tl.load(x + row * x_row + first + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + row * width + first + column, (more / scale).to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = _launch.empty((rows, width), FP8, x.device)
    scales = _launch.empty((rows,), torch.float32, x.device)
    if rows:
        block = min(_BLOCK, _launch.next_power_of_2(width))
        with _launch.on_device_of(x):
            _quantize_rows[(rows,)](
                x, out, scales, width, x.stride(0), LARGEST=LARGEST, ONCE=width <= block, BLOCK=block,
                num_warps=16 if block > 4096 else 8, **_launch.dependent(x),
            )  # fmt: skip
    return out, scales
