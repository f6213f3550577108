"""Triton version of token_logprobs. `kernels.token_logprobs` documents the op.

The first launch divides the vocabulary into parts, and has one program for each part of each result. Each
program finds the part's maximum, the sum of the part's exponentials, and the part's most likely tokens. The
second launch merges the parts of each result. A program whose row needs no logprobs returns before it loads a
logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.token_logprobs import types

_MOST = tl.constexpr(types.MAX_TOP)
_BLOCK = 4096  # tokens of a part
_NONE = tl.constexpr((1 << 31) - 1)


@triton.jit
def _parts(
    logits, row_stride, rows, tops, maxima, sums, values, ids, vocab, splits, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    result, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = tl.load(tops + result)
    if top >= 0:
        row = tl.load(rows + result)
        token = split * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(
            tl.float32
        )
        best = tl.max(score, 0)
        weights = tl.where(score > -float("inf"), tl.exp(score - best), 0.0)
        place = result * splits + split
        tl.store(maxima + place, best)
        tl.store(sums + place, tl.sum(weights, 0))
        for rank in range(top):
            best = tl.max(score, 0)
            first = tl.min(tl.where(score == best, token, _NONE), 0)
            tl.store(values + place * _MOST + rank, best)
            tl.store(ids + place * _MOST + rank, tl.where(best > -float("inf"), first, -1))
            score = tl.where(token == first, -float("inf"), score)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _merge(
    logits, row_stride, rows, tokens, tops, maxima, sums, values, ids, found, splits,
    SPLITS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    result = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + result)
    if top >= 0:
        split = tl.arange(0, SPLITS)
        known = split < splits
        parts = tl.load(maxima + result * splits + split, mask=known, other=-float("inf"))
        best = tl.max(parts, 0)
        weights = tl.load(sums + result * splits + split, mask=known, other=0.0)
        total = best + tl.log(tl.sum(tl.where(parts > -float("inf"), weights * tl.exp(parts - best), 0.0), 0))
        token = tl.load(tokens + result)
        row = tl.load(rows + result)
        own = tl.load(logits + row * row_stride + token, mask=token >= 0, other=0.0).to(tl.float32) - total
        out = found + result * (1 + 2 * _MOST)
        tl.store(out, tl.where(token >= 0, own, 0.0).to(tl.int32, bitcast=True))
        # Ranks past the wanted number have no token.
        rank = tl.arange(0, MOST)
        tl.store(out + 1 + rank, tl.full((MOST,), -1, tl.int32), mask=(rank >= top) & (rank < _MOST))
        tl.store(out + 1 + _MOST + rank, tl.zeros((MOST,), tl.int32), mask=(rank >= top) & (rank < _MOST))
        place = (result * splits + split[:, None]) * _MOST + rank[None, :]
        listed = known[:, None] & (rank[None, :] < top)
        candidates = tl.load(values + place, mask=listed, other=-float("inf"))
        names = tl.load(ids + place, mask=listed, other=-1)
        for one in range(top):
            best = tl.max(tl.max(candidates, 1), 0)
            tied = (candidates == best) & (names >= 0)
            first = tl.min(tl.min(tl.where(tied, names, _NONE), 1), 0)
            there = first < _NONE
            tl.store(out + 1 + one, tl.where(there, first, -1))
            tl.store(out + 1 + _MOST + one, tl.where(there, best - total, 0.0).to(tl.int32, bitcast=True))
            taken = names == first
            candidates = tl.where(taken, -float("inf"), candidates)
            names = tl.where(taken, -1, names)
    if PDL:
        gdc_launch_dependents()


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, tops: torch.Tensor
) -> torch.Tensor:
    count, vocab, device = rows.shape[0], logits.shape[1], logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    found = _launch.empty((count, types.WORDS), torch.int32, device)
    if not count:
        return found
    splits = _launch.ceil_div(vocab, _BLOCK)
    maxima, sums = (_launch.empty((count, splits), torch.float32, device) for _ in range(2))
    values = _launch.empty((count, splits, types.MAX_TOP), torch.float32, device)
    ids = _launch.empty((count, splits, types.MAX_TOP), torch.int32, device)
    rows, tokens, tops = rows.contiguous(), tokens.contiguous(), tops.contiguous()
    with _launch.on_device_of(logits):
        _parts[(count, splits)](
            logits, logits.stride(0), rows, tops, maxima, sums, values, ids, vocab, splits,
            BLOCK=min(_BLOCK, max(16, _launch.next_power_of_2(vocab))), num_warps=8,
            **_launch.dependent(logits),
        )  # fmt: skip
        _merge[(count,)](
            logits, logits.stride(0), rows, tokens, tops, maxima, sums, values, ids, found, splits,
            SPLITS=_launch.next_power_of_2(splits), MOST=_launch.next_power_of_2(types.MAX_TOP), num_warps=4,
            **_launch.dependent(logits),
        )  # fmt: skip
    return found
