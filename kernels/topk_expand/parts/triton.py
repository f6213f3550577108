"""Triton kernels that search parts of a row's vocabulary, and the merge of the parts' results."""

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
    SHORT_INDEX,
    WIDE_INDEX,
    best_keys,
    best_keys_of_rows,
    best_short_keys,
    key_index,
    key_value,
    lengthen_key,
    narrowed,
    rank_key,
    short_key,
    widened,
)
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.topk_expand.types import Noise

MAX_BLOCK = 4096  # largest block whose offsets fit into a key of `short_key`
WANTED_PROGRAMS = 128
MAX_SPLITS = 32  # with more splits, the merge dominates
CHUNKED = 1024
"""Least block size for which only the best chunks of a block are searched for the best elements.

`_best_of_plain` explains the search.
"""
CHUNKED_PROGRAMS = 256
"""Least number of programs for which the search `CHUNKED` is used. It takes more steps per program. With
fewer programs, the steps of a single program would determine the time of the launch."""
UNFUSED = {"enable_fp_fusion": False}
"""Launch option of kernels that merge parts. It turns off the fusion of products and sums.

With fusion, the lanes of one row might round differently and compute different log-sum-exps. Equal logits
would then get scores that differ in the last bit, and would no longer be ordered by index."""


@triton.jit
def max_and_sum(values):
    """Return the maximum of a block and the sum of exp(value - maximum); (-inf, 0) for a block of -inf."""
    top = tl.max(values, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.sum(tl.exp(values - base), 0)


@triton.jit
def _log_sum_exp(tops, sums):
    """Merge the splits' (maximum, sum) pairs of every row, ``[rows, splits]``; -inf for a row of -inf."""
    top = tl.max(tops, 1)
    nothing = top == -float("inf")
    base = tl.where(nothing, 0.0, top)
    return top + tl.log(tl.where(nothing, 1.0, tl.sum(sums * tl.exp(tops - base[:, None]), 1)))


@triton.jit
def _best_of_plain(
    part, values, place, inside, first, count, topk, SHORT: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the best keys of a block of `count` logits at address `part`.

    `first` is the index of the first logit.

    Finding the maximum `topk` times reads all elements `topk` times. With CHUNK > 0, the maximum of each
    chunk of CHUNK elements is found first. The best `topk` elements are in the `topk` chunks with the
    greatest maxima, so only those chunks are loaded again and searched.
    """
    if SHORT:
        short = tl.where(inside, short_key(values, place), NO_SHORT_KEY)
        if CHUNK > 0:
            best_chunks = best_short_keys(
                tl.max(tl.reshape(short, (BLOCK // CHUNK, CHUNK)), 1), topk, BLOCK_K
            )
            near = -((best_chunks & SHORT_INDEX) - SHORT_INDEX) // CHUNK * CHUNK
            near = near[:, None] + tl.arange(0, CHUNK)[None, :]
            again = tl.load(part + near, mask=near < count, other=-float("inf")).to(tl.float32)
            short = tl.reshape(
                tl.where(near < count, short_key(again, near), NO_SHORT_KEY), (BLOCK_K * CHUNK,)
            )
        short = best_short_keys(short, topk, BLOCK_K)
        best = tl.where(short == NO_SHORT_KEY, NO_KEY, lengthen_key(short, first))
    else:
        keys = tl.where(inside, rank_key(values, first + place), NO_KEY)
        if CHUNK > 0:
            best_chunks = best_keys(tl.max(tl.reshape(keys, (BLOCK // CHUNK, CHUNK)), 1), topk, BLOCK_K)
            # The index of NO_KEY is meaningless, so clamp it to any valid chunk.
            near = tl.minimum(tl.maximum(key_index(best_chunks) - first, 0), BLOCK - 1) // CHUNK * CHUNK
            near = near[:, None] + tl.arange(0, CHUNK)[None, :]
            again = tl.load(part + near, mask=near < count, other=-float("inf")).to(tl.float32)
            keys = tl.reshape(
                tl.where(near < count, rank_key(again, first + near), NO_KEY), (BLOCK_K * CHUNK,)
            )
        best = best_keys(keys, topk, BLOCK_K)
    return best


@triton.jit(do_not_specialize=["width", "level"], do_not_specialize_on_alignment=["positions", "choices"])
def _expand_split(
    logits, row_stride, d2t, temperature, seeds, positions, choices, keys, shares, vocab, splits, topk, width,
    level,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store the best keys and the shares (`PartKeys`) of one block of one row.

    `width` rows share a noise entry.
    """
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    draft_id = split * BLOCK + place
    inside = draft_id < vocab
    first = split * BLOCK
    part = logits + row * row_stride + first
    plain = tl.load(part + place, mask=inside, other=-float("inf")).to(tl.float32)
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
            best = _best_of_plain(
                part, plain, place, inside, first, vocab - first, topk, SHORT, BLOCK, CHUNK, BLOCK_K
            )
    else:
        best = _best_of_plain(
            part, plain, place, inside, first, vocab - first, topk, SHORT, BLOCK, CHUNK, BLOCK_K
        )
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
def _best_of_splits(
    keys, row, real, splits, topk, narrow, SHORT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the best keys ``[BLOCK_W, BLOCK_K]`` of every row over all its splits, descending.

    With SHORT, the function compares keys of half the width if the values were bf16 (`narrow`).
    """
    count = splits * topk
    candidate = tl.arange(0, BLOCK_C)
    found = tl.load(
        keys + row[:, None] * count + candidate[None, :],
        mask=real[:, None] & (candidate < count)[None, :],
        other=NO_KEY,
    )
    if SHORT:
        if narrow:  # a conditional expression would compute both branches
            best = widened(_best_narrow(narrowed(found), topk, BLOCK_W, BLOCK_K))
        else:
            best = best_keys_of_rows(found, topk, BLOCK_W, BLOCK_K)
    else:
        best = best_keys_of_rows(found, topk, BLOCK_W, BLOCK_K)
    return best


@triton.jit
def _best_narrow(keys, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the same as `best_keys_of_rows`, for 32-bit keys."""
    place = tl.arange(0, BLOCK)
    best = tl.full((ROWS, BLOCK), NO_SHORT_KEY, tl.int32)
    for i in range(k):
        top = tl.max(keys, 1)
        best = tl.where((place == i)[None, :], top[:, None], best)
        keys = tl.where(keys == top[:, None], NO_SHORT_KEY, keys)
    return best


@triton.jit
def merged(
    logits, row_stride, d2t, keys, shares, parent_scores, row, real, splits, topk, warm,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, ROOTS: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return tokens, scores and log-probs ``[BLOCK_W, BLOCK_K]`` of the children of rows ``row [BLOCK_W]``.

    `warm` is nonzero if the rows have noise. Otherwise the logits themselves are ranked.
    """
    before = tl.zeros((BLOCK_W,), tl.float32)
    if not ROOTS:
        before = tl.load(parent_scores + row, mask=real, other=0.0)
    split = tl.arange(0, BLOCK_S)
    share = shares + (row[:, None] * splits + split[None, :]) * 4
    there = real[:, None] & (split < splits)[None, :]
    log_total = _log_sum_exp(
        tl.load(share, mask=there, other=-float("inf")), tl.load(share + 1, mask=there, other=0.0)
    )
    best = _best_of_splits(keys, row, real, splits, topk, warm == 0, SHORT, BLOCK_W, BLOCK_C, BLOCK_K)
    inside = real[:, None] & (tl.arange(0, BLOCK_K) < topk)[None, :]
    draft_id = tl.where(inside, key_index(best), 0)
    token = draft_id
    if HAS_D2T:
        token += tl.load(d2t + draft_id, mask=inside, other=0).to(tl.int32)
    step = key_value(best) - log_total[:, None]
    logprob = step
    if NOISE:
        noisy = warm > 0
        if noisy:
            noisy_log_total = _log_sum_exp(
                tl.load(share + 2, mask=there, other=-float("inf")), tl.load(share + 3, mask=there, other=0.0)
            )
            step = key_value(best) - noisy_log_total[:, None]
            plain = tl.load(logits + row[:, None] * row_stride + draft_id, mask=inside, other=0.0).to(
                tl.float32
            )
            logprob = plain - log_total[:, None]
    return token, before[:, None] + step, logprob, inside


class PartKeys(NamedTuple):
    """Best keys and log-sum-exps of each part (split) of the vocabulary.

    Attributes:
        keys: ``[rows, splits, topk] int64``, best keys of each split.
        shares: ``[rows, splits, 4] fp32``: the maximum and the sum of exponentials without noise, then the
            same two numbers with noise.
    """

    keys: torch.Tensor
    shares: torch.Tensor


def split_rows(
    logits: torch.Tensor, topk: int, width: int, level: int, d2t: torch.Tensor | None, noise: Noise | None
) -> PartKeys:
    """Launch the first pass over ``logits [rows, V]``. Each `width` adjacent rows share a noise entry."""
    rows, vocab = logits.shape
    wanted = _launch.ceil_div(vocab, max(1, min(MAX_SPLITS, WANTED_PROGRAMS // rows)))
    block = min(MAX_BLOCK, _launch.next_power_of_2(vocab), max(1024, _launch.next_power_of_2(wanted)))
    splits = _launch.ceil_div(vocab, block)
    chunked = topk > 2 and block >= CHUNKED and rows * splits >= CHUNKED_PROGRAMS
    chunk = 0 if not chunked else 64 if block >= MAX_BLOCK else 32
    keys = _launch.empty((rows, splits, topk), torch.int64, logits.device)
    shares = _launch.empty((rows, splits, 4), torch.float32, logits.device)
    heat, seeds, positions, choices = (
        (part.contiguous() for part in noise) if noise is not None else (logits,) * 4
    )
    _expand_split[(rows, splits)](
        logits, logits.stride(0), logits if d2t is None else d2t, heat, seeds, positions, choices, keys,
        shares, vocab, splits, topk, width, level, NOISE=noise is not None, HAS_D2T=d2t is not None,
        SHORT=logits.dtype is torch.bfloat16, BLOCK=block, CHUNK=chunk, BLOCK_K=_launch.next_power_of_2(topk),
        num_warps=max(1, min(4 if chunk else 8, block // 256)), **_launch.dependent(logits),
    )  # fmt: skip
    return PartKeys(keys, shares)


def narrow_keys(logits: torch.Tensor) -> bool:
    """Return whether the keys of these logits fit into 32 bits."""
    return logits.dtype is torch.bfloat16 and logits.shape[1] <= WIDE_INDEX.value + 1
