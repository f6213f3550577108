"""Triton version of invariant_gemm: one tile size for all row counts.

`kernels.invariant_gemm` documents the op.

A matrix library chooses tiles and splits by the number of rows. The order of a row's summation then changes
with the size of the batch. Here, the tile and the number of splits depend on the weight only. A tile covers
BLOCK_OUT rows of the weight and BLOCK_ROWS rows of x. Every element of a tile results from the same chain of
dot products.

No kernel is specialised on the number of rows. Otherwise, a single row would run other code, which adds in
another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch

_WANTED_PROGRAMS = (
    264  # two per multiprocessor of an H200; a constant, so that the result does not depend on the GPU
)
_MAX_SPLITS = 8
_BLOCK_FINISH = 1024


@triton.jit(do_not_specialize=["rows"])
def _project(
    x, weight, bias, residual, out, rows,
    WIDEN: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr
):  # fmt: skip
    # Row blocks vary fastest, so that programs that read the same part of the weight run together.
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(2)
    real_row, real_feature = row < rows, feature < OUT
    weight_rows = weight + feature.to(tl.int64)[:, None] * IN
    x_rows = x + row[None, :] * IN
    acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for step in range(0, SHARE, BLOCK_IN):
        k = split * SHARE + step + tl.arange(0, BLOCK_IN)
        inside = k < IN
        w = tl.load(
            weight_rows + k[None, :],
            mask=real_feature[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        a = tl.load(x_rows + k[:, None], mask=inside[:, None] & real_row[None, :], other=0.0)
        if WIDEN:
            w, a = w.to(tl.float32), a.to(tl.float32)
        acc = tl.dot(w, a, acc, input_precision="ieee")
    place = row[None, :] * OUT + feature[:, None]
    real = real_feature[:, None] & real_row[None, :]
    if SPLITS > 1:
        tl.store(out + split * (rows.to(tl.int64) * OUT) + place, acc, mask=real)
    else:
        if BIAS:
            acc += tl.load(bias + feature, mask=real_feature, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            acc += tl.load(residual + place, mask=real, other=0.0).to(tl.float32)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _finish(
    parts, bias, residual, out, rows, OUT: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = feature < OUT
    place = row * OUT + feature
    total = tl.load(parts + place, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * (rows.to(tl.int64) * OUT) + place, mask=real, other=0.0)
    if BIAS:
        total += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real)


def _splits(blocks: int, width: int, block_in: int) -> int:
    """Return the number of shares of the width with which one block of rows fills a GPU.

    Each share keeps enough steps for pipelining.
    """
    splits = 1
    while (
        splits < _MAX_SPLITS and 2 * splits * blocks <= _WANTED_PROGRAMS and width >= 16 * splits * block_in
    ):
        splits *= 2
    return splits


def invariant_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    rows, width = x.shape
    out_features = weight.shape[0]
    out = _launch.empty((rows, out_features), x.dtype, x.device)
    if rows == 0:
        return out
    # These constants depend only on the weight, because constants that depend on the number of rows would
    # change the order of the sums.
    single = x.dtype == torch.float32
    block_rows, block_out, block_in, stages = (16, 32, 32, 2) if single else (64, 64, 128, 4)
    blocks = _launch.ceil_div(out_features, block_out)
    splits = _splits(blocks, width, block_in)
    share = _launch.ceil_div(_launch.ceil_div(width, splits), block_in) * block_in
    x, weight = x.contiguous(), weight.contiguous()
    added = out if bias is None else bias.contiguous()
    base = out if residual is None else residual.contiguous()
    parts = out if splits == 1 else _launch.empty((splits, rows, out_features), torch.float32, x.device)
    with _launch.on_device_of(x):
        _project[(_launch.ceil_div(rows, block_rows), blocks, splits)](
            x, weight, added, base, parts, rows, WIDEN=not isinstance(_project, triton.JITFunction), IN=width,
            OUT=out_features, SPLITS=splits, SHARE=share, BIAS=bias is not None,
            RESIDUAL=residual is not None, BLOCK_ROWS=block_rows, BLOCK_OUT=block_out, BLOCK_IN=block_in,
            num_warps=4, num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            _finish[(rows, _launch.ceil_div(out_features, _BLOCK_FINISH))](
                parts, added, base, out, rows, OUT=out_features, SPLITS=splits, BIAS=bias is not None,
                RESIDUAL=residual is not None, BLOCK=_BLOCK_FINISH, num_warps=4,
            )  # fmt: skip
    return out
