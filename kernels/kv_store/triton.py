"""Triton version of kv_store: one program per row and block of columns.

`kernels.kv_store` documents the op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch
from outrider.kernels._fp8 import FP8


@triton.jit
def _store(k, v, k_plane, v_plane, slots, k_row, k_head, v_row, v_head, SIZE: tl.constexpr, DIM: tl.constexpr,
           SATURATE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = i < SIZE
        head, d = i // DIM, i % DIM
        keys = tl.load(k + row * k_row + head * k_head + d, mask=inside)
        values = tl.load(v + row * v_row + head * v_head + d, mask=inside)
        if SATURATE:  # the plain conversion to e4m3 would turn larger values into NaN
            keys, values = (
                tl.clamp(keys.to(tl.float32), -448.0, 448.0),
                tl.clamp(values.to(tl.float32), -448.0, 448.0),
            )
        tl.store(k_plane + slot * SIZE + i, keys.to(k_plane.dtype.element_ty), mask=inside)
        tl.store(v_plane + slot * SIZE + i, values.to(v_plane.dtype.element_ty), mask=inside)


def kv_store(
    k: torch.Tensor, v: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, slots: torch.Tensor
) -> None:
    rows, kv_heads, dim = k.shape
    size = kv_heads * dim
    if rows == 0:
        return
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    block = min(1024, _launch.next_power_of_2(size))
    with _launch.on_device_of(k):
        _store[(rows, _launch.ceil_div(size, block))](
            k, v, k_plane, v_plane, slots.contiguous(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            size, dim, k_plane.dtype is FP8, block
        )  # fmt: skip
