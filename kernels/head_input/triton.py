"""Triton version of head_input: one program per half of an output row.

`kernels.head_input` documents the ops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch


@triton.jit
def _normed(x, weight, column, inside, size, eps, NORM: tl.constexpr):
    if NORM:
        x = (
            x
            * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
            * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        )
    return x


@triton.jit
def _input(
    tokens, embedding, features, feature_stride, rows, embedding_norm, feature_norm, pair, residual, size,
    eps,
    ROWS: tl.constexpr, EMBEDDING_NORM: tl.constexpr, FEATURE_NORM: tl.constexpr,
    NORMED_RESIDUAL: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    EACH: tl.constexpr = 2 if PAIRED else 1
    half = pair + row * EACH * size + column
    if PAIRED and tl.program_id(1) == 0:
        token = tl.load(tokens + row).to(tl.int64)
        x = tl.load(embedding + token * size + column, mask=inside, other=0.0).to(tl.float32)
        x = _normed(x, embedding_norm, column, inside, size, eps, EMBEDDING_NORM)
        if PDL:
            gdc_launch_dependents()
        tl.store(half, x.to(pair.dtype.element_ty), mask=inside)
    else:
        source = row
        if ROWS:
            source = tl.load(rows + row).to(tl.int64)
        raw = tl.load(features + source * feature_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = _normed(raw, feature_norm, column, inside, size, eps, FEATURE_NORM)
        if PDL:
            gdc_launch_dependents()
        tl.store(half + (EACH - 1) * size, x.to(pair.dtype.element_ty), mask=inside)
        kept = x if NORMED_RESIDUAL else raw
        tl.store(residual + row * size + column, kept.to(residual.dtype.element_ty), mask=inside)


def head_input(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    features: torch.Tensor,
    rows: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    feature_norm: torch.Tensor | None,
    eps: float,
    normed_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, hidden = tokens.shape[0], embedding.shape[1]
    features = features if features.stride(1) == 1 else features.contiguous()
    pair = _launch.empty((count, 2 * hidden), embedding.dtype, embedding.device)
    residual = _launch.empty((count, hidden), embedding.dtype, embedding.device)
    if count:
        block = _launch.next_power_of_2(hidden)
        with _launch.on_device_of(tokens):
            _input[(count, 2)](
                tokens.contiguous(), embedding, features, features.stride(0),
                tokens if rows is None else rows.contiguous(),
                embedding if embedding_norm is None else embedding_norm,
                embedding if feature_norm is None else feature_norm, pair, residual, hidden, eps,
                ROWS=rows is not None, EMBEDDING_NORM=embedding_norm is not None,
                FEATURE_NORM=feature_norm is not None, NORMED_RESIDUAL=normed_residual, PAIRED=True,
                BLOCK=block, num_warps=max(1, min(16, block // 512)), **_launch.dependent(tokens),
            )  # fmt: skip
    return pair, residual


def feature_input(
    features: torch.Tensor, rows: torch.Tensor | None, norm: torch.Tensor, eps: float, normed_residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    count, hidden = (features if rows is None else rows).shape[0], features.shape[1]
    features = features if features.stride(1) == 1 else features.contiguous()
    normed, residual = (_launch.empty((count, hidden), norm.dtype, features.device) for _ in range(2))
    if count:
        block = _launch.next_power_of_2(hidden)
        with _launch.on_device_of(features):
            _input[(count, 1)](
                features, norm, features, features.stride(0), features if rows is None else rows.contiguous(),
                norm, norm, normed, residual, hidden, eps, ROWS=rows is not None, EMBEDDING_NORM=False,
                FEATURE_NORM=True, NORMED_RESIDUAL=normed_residual, PAIRED=False, BLOCK=block,
                num_warps=max(1, min(16, block // 512)), **_launch.dependent(features),
            )  # fmt: skip
    return normed, residual
