"""Triton version of row_norm: one program per row (and head). `kernels.row_norm` documents the op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch


@triton.jit
def _norm(x, weight, out, eps, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    scale = tl.load(weight + (row % HEADS) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = _launch.empty(tuple(x.shape), x.dtype, x.device)
    size = x.shape[-1]
    if x.numel():
        with _launch.on_device_of(x):
            _norm[(x.numel() // size,)](
                x.contiguous(), weight.contiguous(), out, eps, HEADS=weight.numel() // size, SIZE=size,
                BLOCK=_launch.next_power_of_2(size), num_warps=4 if size > 512 else 1,
            )  # fmt: skip
    return out
