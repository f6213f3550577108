"""Triton version of feature_rows: one program per row and block of columns.

`kernels.feature_rows` documents the op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["total"])
def _scatter_rows(
    rows, slots, plane, places, out, total, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot, place = tl.load(slots + row), tl.load(places + row)
    if (slot >= 0) | (place >= 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = (split * total + row) * width + column
            value += tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        if PDL:
            gdc_launch_dependents()
        tl.store(out + place * width + column, value.to(out.dtype.element_ty), mask=inside & (place >= 0))
        tl.store(plane + slot * width + column, value.to(plane.dtype.element_ty), mask=inside & (slot >= 0))


def scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> None:
    count, width = rows.shape[-2:]
    block = min(_BLOCK, _launch.next_power_of_2(width))
    if count * width:
        with _launch.on_device_of(rows):
            _scatter_rows[(count, _launch.ceil_div(width, block))](
                rows, slots.contiguous(), plane, places.contiguous(), out, count, width,
                SPLITS=rows.shape[0] if rows.dim() == 3 else 1, BLOCK=block, **_launch.dependent(rows),
            )  # fmt: skip
