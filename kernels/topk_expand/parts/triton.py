"""The vocabulary of a row in parts: what each part leaves, and how they are merged."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels._order.triton import (
    NO_KEY,
    NO_SHORT_KEY,
    best_keys,
    best_keys_of_rows,
    best_short_keys,
    key_index,
    key_value,
    lengthen_key,
    rank_key,
    short_key,
)
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.topk_expand.types import Noise

MAX_BLOCK = 4096  # what a short key has places for
WANTED_PROGRAMS = 128
MAX_SPLITS = 32  # beyond, the merge is what takes time
COUNTED = tl.constexpr(16)
"""Up to so many keys are ranked by counting; of 128, each thread's loads took three times what the maxima take (measured)."""
UNFUSED = {"enable_fp_fusion": False}
"""For merges. A product that is rounded in one lane and fused into the sum in another gives the lanes of a row different log-sum-exps,
and equal logits scores that differ in the last bit: their order would not be that of their indices."""


@triton.jit
def max_and_sum(values):
    """Return the maximum of a block and the sum of exp(value - maximum); (-inf, 0) for a block of -inf."""
    top = tl.max(values, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.sum(tl.exp(values - base), 0)


@triton.jit
def _log_sum_exp(tops, sums):
    """Merge the splits' (maximum, sum) pairs of every row, ``[rows, splits]``; -inf for a row without any."""
    top = tl.max(tops, 1)
    nothing = top == -float("inf")
    base = tl.where(nothing, 0.0, top)
    return top + tl.log(tl.where(nothing, 1.0, tl.sum(sums * tl.exp(tops - base[:, None]), 1)))


@triton.jit
def _best_of_plain(values, place, inside, first, topk, SHORT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the best keys of a block of logits whose first index is `first`."""
    if SHORT:
        short = best_short_keys(tl.where(inside, short_key(values, place), NO_SHORT_KEY), topk, BLOCK_K)
        best = tl.where(short == NO_SHORT_KEY, NO_KEY, lengthen_key(short, first))
    else:
        best = best_keys(tl.where(inside, rank_key(values, first + place), NO_KEY), topk, BLOCK_K)
    return best


@triton.jit(do_not_specialize=["width", "level"])
def _expand_split(
    logits, row_stride, d2t, temperature, seeds, positions, choices, keys, shares, vocab, splits, topk, width, level,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Leave the best keys and the shares of one block of one row; `width` rows share an entry of the noise."""
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    draft_id = split * BLOCK + place
    inside = draft_id < vocab
    plain = tl.load(logits + row * row_stride + draft_id, mask=inside, other=-float("inf")).to(tl.float32)
    top, total = max_and_sum(plain)
    noisy_top, noisy_total = top, total
    if NOISE:
        entry = row // width
        heat = tl.load(temperature + entry)
        if heat > 0:
            token = draft_id.to(tl.int64)
            if HAS_D2T:
                token += tl.load(d2t + draft_id, mask=inside, other=0)
            position = tl.load(positions + entry).to(tl.int64) + level
            noise = gumbel(tl.load(seeds + entry), position, tl.load(choices + entry), token)
            value = tl.div_rn(plain, tl.zeros_like(plain) + heat) + noise
            noisy_top, noisy_total = max_and_sum(value)
            best = best_keys(tl.where(inside, rank_key(value, draft_id), NO_KEY), topk, BLOCK_K)
        else:
            best = _best_of_plain(plain, place, inside, split * BLOCK, topk, SHORT, BLOCK_K)
    else:
        best = _best_of_plain(plain, place, inside, split * BLOCK, topk, SHORT, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
    share = shares + (row * splits + split) * 4
    tl.store(share, top)
    tl.store(share + 1, total)
    tl.store(share + 2, noisy_top)
    tl.store(share + 3, noisy_total)
    rank = tl.arange(0, BLOCK_K)
    tl.store(keys + (row * splits + split) * topk + rank, best, mask=rank < topk)


@triton.jit
def _best_of_splits(keys, ranked, row, real, splits, topk, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the best keys ``[BLOCK_W, BLOCK_K]`` of every row among those of its splits, descending, by way of ``ranked [rows, topk]``.

    Of few keys each one's place is the number of keys above it: counting them asks no other thread, whereas finding one maximum after
    the other waits for all of them each time.
    """
    count = splits * topk
    candidate = tl.arange(0, BLOCK_C)
    found = tl.load(keys + row[:, None] * count + candidate[None, :], mask=real[:, None] & (candidate < count)[None, :], other=NO_KEY)
    if BLOCK_C <= COUNTED:
        rank = tl.zeros((BLOCK_W, BLOCK_C), tl.int32)
        for split in range(splits):
            for i in tl.static_range(BLOCK_K):
                other = tl.load(keys + row * count + split * topk + i, mask=real & (i < topk), other=NO_KEY)
                rank += (other[:, None] > found).to(tl.int32)
        tl.store(ranked + row[:, None] * topk + rank, found, mask=(found > NO_KEY) & (rank < topk))
        tl.debug_barrier()  # other threads have stored the rest of a row
        place = tl.arange(0, BLOCK_K)
        best = tl.load(ranked + row[:, None] * topk + place[None, :], mask=real[:, None] & (place < topk)[None, :], other=NO_KEY)
    else:
        best = best_keys_of_rows(found, topk, BLOCK_W, BLOCK_K)
    return best


@triton.jit
def merged(
    logits, row_stride, d2t, keys, shares, ranked, parent_scores, row, real, splits, topk,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, ROOTS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the tokens, scores and log-probs ``[BLOCK_W, BLOCK_K]`` of the children of the rows ``row [BLOCK_W]``."""
    split = tl.arange(0, BLOCK_S)
    share = shares + (row[:, None] * splits + split[None, :]) * 4
    there = real[:, None] & (split < splits)[None, :]
    log_total = _log_sum_exp(tl.load(share, mask=there, other=-float("inf")), tl.load(share + 1, mask=there, other=0.0))
    best = _best_of_splits(keys, ranked, row, real, splits, topk, BLOCK_W, BLOCK_C, BLOCK_K)
    inside = real[:, None] & (tl.arange(0, BLOCK_K) < topk)[None, :]
    draft_id = tl.where(inside, key_index(best), 0)
    token = draft_id
    if HAS_D2T:
        token += tl.load(d2t + draft_id, mask=inside, other=0).to(tl.int32)
    step = key_value(best) - log_total[:, None]
    logprob = step
    if NOISE:
        noisy_log_total = _log_sum_exp(tl.load(share + 2, mask=there, other=-float("inf")), tl.load(share + 3, mask=there, other=0.0))
        step = key_value(best) - noisy_log_total[:, None]
        plain = tl.load(logits + row[:, None] * row_stride + draft_id, mask=inside, other=0.0).to(tl.float32)
        logprob = plain - log_total[:, None]
    score = step
    if not ROOTS:
        score = tl.load(parent_scores + row, mask=real, other=0.0)[:, None] + step
    return token, score, logprob, inside


class Parts(NamedTuple):
    """What the splits of a vocabulary leave, and room to merge it.

    Attributes:
        keys: ``[rows, splits, topk] int64``.
        shares: ``[rows, splits, 4] fp32``.
        ranked: ``[rows, topk] int64``.
    """

    keys: torch.Tensor
    shares: torch.Tensor
    ranked: torch.Tensor


def split_rows(logits: torch.Tensor, topk: int, width: int, level: int, d2t: torch.Tensor | None, noise: Noise | None) -> Parts:
    """Launch the first pass over ``logits [rows, V]``, of which `width` rows share an entry of the noise."""
    rows, vocab = logits.shape
    wanted = _launch.ceil_div(vocab, max(1, min(MAX_SPLITS, WANTED_PROGRAMS // rows)))
    block = min(MAX_BLOCK, _launch.next_power_of_2(vocab), max(1024, _launch.next_power_of_2(wanted)))
    splits = _launch.ceil_div(vocab, block)
    keys = _launch.empty((rows, splits, topk), torch.int64, logits.device)
    shares = _launch.empty((rows, splits, 4), torch.float32, logits.device)
    heat, seeds, positions, choices = (part.contiguous() for part in noise) if noise is not None else (logits,) * 4
    _expand_split[(rows, splits)](
        logits, logits.stride(0), logits if d2t is None else d2t, heat, seeds, positions, choices, keys, shares, vocab, splits, topk,
        width, level, NOISE=noise is not None, HAS_D2T=d2t is not None, SHORT=logits.dtype is torch.bfloat16,
        BLOCK=block, BLOCK_K=_launch.next_power_of_2(topk), num_warps=max(1, min(8, block // 256)), **_launch.dependent(logits),
    )  # fmt: skip
    return Parts(keys, shares, _launch.empty((rows, topk), torch.int64, logits.device))
