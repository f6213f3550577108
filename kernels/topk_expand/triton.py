"""topk_expand in Triton; the contract is in the package's docstring.

The vocabulary is split over programs: each reads its part of the logits once, adds the noise, and leaves its best keys and its share of the
two log-sum-exps (of the perturbed vector and of the plain one); a second launch merges the splits. There it is one program per row, or,
for a whole level, one per sequence, which picks the next beam too.
"""

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
from outrider.kernels.topk_expand.types import Beam, Candidates, Expansion, Noise

_MAX_BLOCK = 4096  # what a short key has places for
_WANTED_PROGRAMS = 128
_MAX_SPLITS = 32  # beyond, the merge is what takes time
_UNFUSED = {"enable_fp_fusion": False}
"""For merges. A product that is rounded in one lane and fused into the sum in another gives the lanes of a row different log-sum-exps,
and equal logits scores that differ in the last bit: their order would not be that of their indices."""


@triton.jit
def _max_and_sum(values):
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
    top, total = _max_and_sum(plain)
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
            noisy_top, noisy_total = _max_and_sum(value)
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
def _merged(
    logits, row_stride, d2t, keys, shares, parent_scores, row, real, splits, topk,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, ROOTS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the tokens, scores and log-probs ``[BLOCK_W, BLOCK_K]`` of the children of the rows ``row [BLOCK_W]``."""
    split = tl.arange(0, BLOCK_S)
    share = shares + (row[:, None] * splits + split[None, :]) * 4
    there = real[:, None] & (split < splits)[None, :]
    log_total = _log_sum_exp(tl.load(share, mask=there, other=-float("inf")), tl.load(share + 1, mask=there, other=0.0))
    candidate = tl.arange(0, BLOCK_C)
    there_too = real[:, None] & (candidate < splits * topk)[None, :]
    found = tl.load(keys + row[:, None] * (splits * topk) + candidate[None, :], mask=there_too, other=NO_KEY)
    best = best_keys_of_rows(found, topk, BLOCK_W, BLOCK_K)
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


@triton.jit
def _expand_merge(
    logits, row_stride, parent_scores, d2t, keys, shares, tokens, scores, logprobs, splits, topk,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1,), tl.int64)
    token, score, logprob, inside = _merged(
        logits, row_stride, d2t, keys, shares, parent_scores, row, row >= 0, splits, topk, NOISE, HAS_D2T, False, 1, BLOCK_S, BLOCK_C,
        BLOCK_K
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    out = row[:, None] * topk + tl.arange(0, BLOCK_K)[None, :]
    tl.store(tokens + out, token, mask=inside)
    tl.store(scores + out, score, mask=inside)
    tl.store(logprobs + out, logprob, mask=inside)


@triton.jit(do_not_specialize=["first", "width", "column"])
def _level_merge(
    logits, row_stride, d2t, keys, shares, beam_scores, beam_candidates, beam_ancestors, scores, tokens, parents, logprobs,
    next_tokens, next_scores, next_parents, next_candidates, next_ancestors,
    columns, first, splits, topk, width, words, column,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, ROOTS: tl.constexpr, LAST: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Merge the splits of a sequence's rows, note the children from column `first` on, and pick the next beam among them.

    `column` is the scratch column of the next beam's first row.
    """
    if PDL:
        gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_W)
    row = sequence * width + local
    token, score, logprob, inside = _merged(
        logits, row_stride, d2t, keys, shares, beam_scores, row, local < width, splits, topk, NOISE, HAS_D2T, ROOTS, BLOCK_W, BLOCK_S,
        BLOCK_C, BLOCK_K
    )  # fmt: skip
    place = tl.arange(0, BLOCK_K)
    child = local[:, None] * topk + place[None, :]
    parent = tl.full((BLOCK_W,), -1, tl.int32)
    if not ROOTS:
        parent = tl.load(beam_candidates + row, mask=local < width, other=-1)
    table = sequence * columns + first
    if LAST and PDL:
        gdc_launch_dependents()
    tl.store(tokens + table + child, token, mask=inside)
    tl.store(scores + table + child, score, mask=inside)
    tl.store(logprobs + table + child, logprob, mask=inside)
    tl.store(parents + table + child, tl.zeros_like(child) + parent[:, None], mask=inside)
    if not LAST:
        rank = tl.where(inside, rank_key(score, child), NO_KEY)
        best = tl.full((BLOCK_K,), NO_KEY, tl.int64)
        for i in range(topk):
            top = tl.max(tl.max(rank, 1), 0)
            best = tl.where(place == i, top, best)
            rank = tl.where(rank == top, NO_KEY, rank)
        kept = place < topk
        chosen = tl.where(kept, key_index(best), 0)
        above = sequence * width + chosen // topk  # among the rows of this level
        word = tl.arange(0, BLOCK_N)
        bit = tl.full((BLOCK_K,), 1, tl.int32) << ((column + place) % 32)
        mask = tl.where(((column + place) // 32)[:, None] == word[None, :], bit[:, None], 0)
        seen = kept[:, None] & (word < words)[None, :]
        if not ROOTS:
            mask |= tl.load(beam_ancestors + above[:, None] * words + word[None, :], mask=seen, other=0)
        tl.debug_barrier()  # the chosen tokens were stored by other threads
        chosen_token = tl.load(tokens + table + chosen, mask=kept, other=0)
        out = sequence * topk + place
        if PDL:
            gdc_launch_dependents()
        tl.store(next_tokens + out, chosen_token, mask=kept)
        tl.store(next_scores + out, key_value(best), mask=kept)
        tl.store(next_parents + out, above.to(tl.int32), mask=kept)
        tl.store(next_candidates + out, first + chosen, mask=kept)
        tl.store(next_ancestors + out[:, None] * words + word[None, :], mask, mask=seen)


class _Parts(NamedTuple):
    """What the splits of a vocabulary leave.

    Attributes:
        keys: ``[rows, splits, topk] int64``.
        shares: ``[rows, splits, 4] fp32``.
    """

    keys: torch.Tensor
    shares: torch.Tensor


def _split(logits: torch.Tensor, topk: int, width: int, level: int, d2t: torch.Tensor | None, noise: Noise | None) -> _Parts:
    """Launch the first pass over ``logits [rows, V]``, of which `width` rows share an entry of the noise."""
    rows, vocab = logits.shape
    wanted = _launch.ceil_div(vocab, max(1, min(_MAX_SPLITS, _WANTED_PROGRAMS // rows)))
    block = min(_MAX_BLOCK, _launch.next_power_of_2(vocab), max(1024, _launch.next_power_of_2(wanted)))
    splits = _launch.ceil_div(vocab, block)
    keys = _launch.empty((rows, splits, topk), torch.int64, logits.device)
    shares = _launch.empty((rows, splits, 4), torch.float32, logits.device)
    heat, seeds, positions, choices = (part.contiguous() for part in noise) if noise is not None else (logits,) * 4
    _expand_split[(rows, splits)](
        logits, logits.stride(0), logits if d2t is None else d2t, heat, seeds, positions, choices, keys, shares, vocab, splits, topk,
        width, level, NOISE=noise is not None, HAS_D2T=d2t is not None, SHORT=logits.dtype is torch.bfloat16,
        BLOCK=block, BLOCK_K=_launch.next_power_of_2(topk), num_warps=max(1, min(8, block // 256)), **_launch.dependent(logits),
    )  # fmt: skip
    return _Parts(keys, shares)


def topk_expand(logits: torch.Tensor, parent_scores: torch.Tensor, topk: int, d2t: torch.Tensor | None, noise: Noise | None) -> Expansion:
    """See `outrider.kernels.topk_expand.topk_expand`."""
    rows = logits.shape[0]
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = _launch.empty((rows, topk), torch.int32, device)
    scores = _launch.empty((rows, topk), torch.float32, device)
    logprobs = _launch.empty((rows, topk), torch.float32, device)
    if rows:
        offsets = None if d2t is None else d2t.contiguous()
        with _launch.on_device_of(logits):
            keys, shares = _split(logits, topk, 1, 0, offsets, noise)
            splits = keys.shape[1]
            _expand_merge[(rows,)](
                logits, logits.stride(0), parent_scores.contiguous(), logits if offsets is None else offsets, keys, shares, tokens, scores,
                logprobs, splits, topk, NOISE=noise is not None, HAS_D2T=d2t is not None, BLOCK_S=_launch.next_power_of_2(splits),
                BLOCK_C=_launch.next_power_of_2(splits * topk), BLOCK_K=_launch.next_power_of_2(topk), num_warps=1,
                **_UNFUSED, **_launch.dependent(logits),
            )  # fmt: skip
    return Expansion(tokens, scores, logprobs)


def expand_level(
    logits: torch.Tensor,
    beam: Beam | None,
    level: int,
    topk: int,
    candidates: Candidates,
    words: int,
    last: bool,
    d2t: torch.Tensor | None,
    noise: Noise | None,
) -> Beam | None:
    """See `outrider.kernels.topk_expand.expand_level`; two launches."""
    bs, columns = candidates.scores.shape
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()

    def integers(*shape: int) -> torch.Tensor:
        return _launch.empty(shape, torch.int32, device)

    wide = bs * topk
    following = Beam(
        integers(wide), _launch.empty((wide,), torch.float32, device), integers(wide), integers(wide), integers(wide, words)
    )  # fmt: skip
    if bs:
        width = logits.shape[0] // bs
        offsets = None if d2t is None else d2t.contiguous()
        above = following if beam is None else beam
        with _launch.on_device_of(logits):
            keys, shares = _split(logits, topk, width, level, offsets, noise)
            splits = keys.shape[1]
            block_w, block_c = _launch.next_power_of_2(width), _launch.next_power_of_2(splits * topk)
            _level_merge[(bs,)](
                logits, logits.stride(0), logits if offsets is None else offsets, keys, shares, above.scores, above.candidates,
                above.ancestors, candidates.scores, candidates.tokens, candidates.parents, candidates.logprobs,
                following.tokens, following.scores, following.parents, following.candidates, following.ancestors,
                columns, candidates.level(level, topk).start, splits, topk, width, words, level * topk,
                NOISE=noise is not None, HAS_D2T=d2t is not None, ROOTS=beam is None, LAST=last, BLOCK_W=block_w,
                BLOCK_S=_launch.next_power_of_2(splits), BLOCK_C=block_c, BLOCK_K=_launch.next_power_of_2(topk),
                BLOCK_N=_launch.next_power_of_2(words), num_warps=1 if block_w * block_c <= 256 else 4, **_UNFUSED,
                **_launch.dependent(logits),
            )  # fmt: skip
    return None if last else following


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
    """See `outrider.kernels.topk_expand.select_beam`."""
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
