"""Triton version of topk_expand. `kernels.topk_expand` documents the ops.

The vocabulary is split over programs. Each program reads its part of the logits once and adds the noise. The
program then stores its best keys and its share of two log-sum-exps, with and without the noise.

A second launch merges the splits, with one program per row. In `expand_level`, this launch has one program
per sequence, which also selects the next beam. A level over a small vocabulary takes a single launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels._order.triton import NO_KEY, best_keys, key_index, rank_key
from outrider.kernels.topk_expand.levels.triton import expand_level
from outrider.kernels.topk_expand.parts.triton import UNFUSED, merged, narrow_keys, split_rows
from outrider.kernels.topk_expand.types import Expansion, Noise

__all__ = ["expand_level", "select_beam", "topk_expand"]


@triton.jit
def _expand_merge(
    logits, row_stride, parent_scores, d2t, temperature, keys, shares, tokens, scores, logprobs, splits, topk,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, SHORT: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1,), tl.int64)
    warm = tl.program_id(0) * 0
    if NOISE:
        warm = (tl.load(temperature + tl.program_id(0)) > 0).to(tl.int32)
    token, score, logprob, inside = merged(
        logits, row_stride, d2t, keys, shares, parent_scores, row, row >= 0, splits, topk, warm, NOISE,
        HAS_D2T, False, SHORT, 1, BLOCK_S, BLOCK_C, BLOCK_K
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    out = row[:, None] * topk + tl.arange(0, BLOCK_K)[None, :]
    tl.store(tokens + out, token, mask=inside)
    tl.store(scores + out, score, mask=inside)
    tl.store(logprobs + out, logprob, mask=inside)


def topk_expand(
    logits: torch.Tensor,
    parent_scores: torch.Tensor,
    topk: int,
    d2t: torch.Tensor | None,
    noise: Noise | None,
) -> Expansion:
    rows = logits.shape[0]
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = _launch.empty((rows, topk), torch.int32, device)
    scores = _launch.empty((rows, topk), torch.float32, device)
    logprobs = _launch.empty((rows, topk), torch.float32, device)
    if rows:
        offsets = None if d2t is None else d2t.contiguous()
        with _launch.on_device_of(logits):
            keys, shares = split_rows(logits, topk, 1, 0, offsets, noise)
            splits = keys.shape[1]
            _expand_merge[(rows,)](
                logits, logits.stride(0), parent_scores.contiguous(), logits if offsets is None else offsets,
                logits if noise is None else noise.temperature.contiguous(), keys, shares, tokens, scores,
                logprobs, splits, topk,
                NOISE=noise is not None, HAS_D2T=d2t is not None, SHORT=narrow_keys(logits),
                BLOCK_S=_launch.next_power_of_2(splits), BLOCK_C=_launch.next_power_of_2(splits * topk),
                BLOCK_K=_launch.next_power_of_2(topk), num_warps=1, **UNFUSED, **_launch.dependent(logits),
            )  # fmt: skip
    return Expansion(tokens, scores, logprobs)


@triton.jit
def _select(scores, row_stride, out, candidates, topk, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    inside = candidate < candidates
    score = tl.load(scores + row * row_stride + candidate, mask=inside, other=0.0)
    best = best_keys(tl.where(inside, rank_key(score, candidate), NO_KEY), topk, BLOCK_K)
    place = tl.arange(0, BLOCK_K)
    tl.store(out + row * topk + place, key_index(best), mask=place < topk)


def select_beam(scores: torch.Tensor, topk: int) -> torch.Tensor:
    bs, candidates = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    out = _launch.empty((bs, topk), torch.int32, scores.device)
    if bs:
        with _launch.on_device_of(scores):
            _select[(bs,)](
                scores, scores.stride(0), out, candidates, topk,
                BLOCK=_launch.next_power_of_2(candidates), BLOCK_K=_launch.next_power_of_2(topk),
            )  # fmt: skip
    return out
