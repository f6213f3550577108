"""Triton version of merge_attention: one program per block of (row, head) pairs.

`kernels.merge_attention` documents the op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch

_BLOCK_PAIRS = 16
"""With a dim of 128 and four warps, a thread holds 16 elements of each result and loads at least 16 bytes."""


@triton.jit
def _merge(
    first, first_lse, second, second_lse, out, out_lse, first_row, first_head, first_lse_row, first_lse_head,
    second_row, second_head, second_lse_row, second_lse_head, out_row, out_head, out_lse_row, out_lse_head,
    pairs,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = pair < pairs
    row, head = pair // HEADS, pair % HEADS
    a = tl.load(first_lse + row * first_lse_row + head * first_lse_head, mask=inside, other=0.0)
    b = tl.load(second_lse + row * second_lse_row + head * second_lse_head, mask=inside, other=0.0)
    top = tl.maximum(a, b)
    base = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    d = tl.arange(0, BLOCK_D)
    element = inside[:, None] & (d < DIM)[None, :]
    x = tl.load(first + (row * first_row + head * first_head)[:, None] + d[None, :], mask=element, other=0.0)
    y = tl.load(
        second + (row * second_row + head * second_head)[:, None] + d[None, :], mask=element, other=0.0
    )
    x = tl.where((weight_a == 0.0)[:, None], 0.0, x.to(tl.float32) * weight_a[:, None])
    y = tl.where((weight_b == 0.0)[:, None], 0.0, y.to(tl.float32) * weight_b[:, None])
    merged = (x + y) / tl.where(total == 0.0, 1.0, total)[:, None]
    # Every element is read by the program that writes it, so `out` may be one of the results.
    tl.store(
        out + (row * out_row + head * out_head)[:, None] + d[None, :],
        merged.to(out.dtype.element_ty),
        mask=element,
    )
    lse = tl.where(total == 0.0, -float("inf"), base + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(out_lse + row * out_lse_row + head * out_lse_head, lse, mask=inside)


def merge_attention(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    rows, heads, dim = first.shape
    if rows == 0:
        return
    strides = [stride for part, lse in ((first, first_lse), (second, second_lse), (out, out_lse))
               for stride in (*part.stride()[:2], *lse.stride())]  # fmt: skip
    with _launch.on_device_of(first):
        _merge[(_launch.ceil_div(rows * heads, _BLOCK_PAIRS),)](
            first, first_lse, second, second_lse, out, out_lse, *strides, rows * heads,
            HEADS=heads, DIM=dim, BLOCK_P=_BLOCK_PAIRS, BLOCK_D=_launch.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
