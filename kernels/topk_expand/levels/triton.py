"""Triton version of expand_level: children of a level's rows, candidate columns, next level's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels._order.triton import (
    NO_KEY,
    NO_SHORT_KEY,
    key_index,
    key_value,
    lengthen_key,
    ordered_bits,
    rank_key,
    short_key,
    value_of_bits,
)
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.topk_expand.parts.triton import MAX_BLOCK, UNFUSED, merged, narrow_keys, split_rows
from outrider.kernels.topk_expand.types import Beam, Candidates, Noise

_WHOLE_ROWS = 1
"""Largest number of rows per sequence for which one program expands a whole sequence in a single launch.

Measured with four rows per sequence, one launch took 5.6 µs and two launches took 3.9 µs."""


@triton.jit
def _note_and_pick(
    token, score, logprob, inside, sequence, parent, beam_ancestors, scores, tokens, parents, logprobs,
    next_tokens, next_scores, next_parents, next_candidates, next_ancestors, columns, first, topk, width,
    words, column,
    ROOTS: tl.constexpr, LAST: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store a sequence's children ``[BLOCK_W, BLOCK_K]`` from column `first` on, and select the next beam.

    `parent` contains the candidate indices of the rows. `column` is the scratch column of the next beam's
    first row.
    """
    child = tl.arange(0, BLOCK_W)[:, None] * topk + tl.arange(0, BLOCK_K)[None, :]
    table = sequence * columns + first
    if LAST and PDL:  # these are the final stores only if no beam follows
        gdc_launch_dependents()
    tl.store(tokens + table + child, token, mask=inside)
    tl.store(scores + table + child, score, mask=inside)
    tl.store(logprobs + table + child, logprob, mask=inside)
    tl.store(parents + table + child, tl.zeros_like(child) + parent[:, None], mask=inside)
    if not LAST:
        # Compare values and indices separately: hardware finds the extremum of 32 bits in a warp in one
        # instruction.
        left = tl.where(inside, ordered_bits(score), NO_SHORT_KEY)
        place = tl.arange(0, BLOCK_K)
        chosen = tl.zeros((BLOCK_K,), tl.int32)
        bits = tl.zeros((BLOCK_K,), tl.int32)
        chosen_token = tl.zeros((BLOCK_K,), tl.int32)
        for i in range(topk):
            top = tl.max(tl.max(left, 1), 0)
            at = tl.min(tl.min(tl.where(inside & (left == top), child, 0x7FFFFFFF), 1), 0)
            hit = inside & (child == at)
            chosen = tl.where(place == i, at, chosen)
            bits = tl.where(place == i, top, bits)
            chosen_token = tl.where(place == i, tl.max(tl.max(tl.where(hit, token, -1), 1), 0), chosen_token)
            left = tl.where(hit, NO_SHORT_KEY, left)
        kept = place < topk
        above = sequence * width + chosen // topk  # row of this level that each child belongs to
        word = tl.arange(0, BLOCK_N)
        bit = tl.full((BLOCK_K,), 1, tl.int32) << ((column + place) % 32)
        mask = tl.where(((column + place) // 32)[:, None] == word[None, :], bit[:, None], 0)
        seen = kept[:, None] & (word < words)[None, :]
        if not ROOTS:
            mask |= tl.load(beam_ancestors + above[:, None] * words + word[None, :], mask=seen, other=0)
        out = sequence * topk + place
        if PDL:
            gdc_launch_dependents()
        tl.store(next_tokens + out, chosen_token, mask=kept)
        tl.store(next_scores + out, value_of_bits(bits), mask=kept)
        tl.store(next_parents + out, above.to(tl.int32), mask=kept)
        tl.store(next_candidates + out, first + chosen, mask=kept)
        tl.store(next_ancestors + out[:, None] * words + word[None, :], mask, mask=seen)


@triton.jit
def _parents(beam_candidates, sequence, width, ROOTS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the candidate index of each row of a sequence, ``[BLOCK_W] int32``: -1 for a root."""
    local = tl.arange(0, BLOCK_W)
    parent = tl.full((BLOCK_W,), -1, tl.int32)
    if not ROOTS:
        parent = tl.load(beam_candidates + sequence * width + local, mask=local < width, other=-1)
    return parent


# These numbers follow the shapes of trees, which clients choose.
@triton.jit(do_not_specialize=["columns", "first", "width", "column"])
def _level_merge(
    logits, row_stride, d2t, temperature, keys, shares, beam_scores, beam_candidates, beam_ancestors, scores,
    tokens, parents, logprobs, next_tokens, next_scores, next_parents, next_candidates, next_ancestors,
    columns, first, splits, topk, width, words, column,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, SHORT: tl.constexpr, ROOTS: tl.constexpr, LAST: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Merge the splits of a sequence's rows, store the children and select the next beam."""
    if PDL:
        gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_W)
    row = sequence * width + local
    parent = _parents(beam_candidates, sequence, width, ROOTS, BLOCK_W)
    warm = tl.program_id(0) * 0
    if NOISE:
        warm = (tl.load(temperature + sequence) > 0).to(tl.int32)
    token, score, logprob, inside = merged(
        logits, row_stride, d2t, keys, shares, beam_scores, row, local < width, splits, topk, warm, NOISE,
        HAS_D2T, ROOTS, SHORT, BLOCK_W, BLOCK_S, BLOCK_C, BLOCK_K
    )  # fmt: skip
    _note_and_pick(
        token, score, logprob, inside, sequence, parent, beam_ancestors, scores, tokens, parents, logprobs,
        next_tokens, next_scores, next_parents, next_candidates, next_ancestors, columns, first, topk, width,
        words, column, ROOTS, LAST, BLOCK_W, BLOCK_K, BLOCK_N, PDL
    )  # fmt: skip


@triton.jit
def _log_total(values):
    """Return the log-sum-exp of every row of a block; -inf for a row of -inf."""
    top = tl.max(values, 1)
    nothing = top == -float("inf")
    base = tl.where(nothing, 0.0, top)
    return top + tl.log(tl.where(nothing, 1.0, tl.sum(tl.exp(values - base[:, None]), 1)))


@triton.jit
def _best_of_rows(keys, k, NONE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the k largest keys of every row of ``keys [BLOCK_W, n]``, descending: ``[BLOCK_W, BLOCK_K]``."""
    place = tl.arange(0, BLOCK_K)
    best = tl.full((BLOCK_W, BLOCK_K), NONE, keys.dtype)
    for i in range(k):
        top = tl.max(keys, 1)
        best = tl.where((place == i)[None, :], top[:, None], best)
        keys = tl.where(keys == top[:, None], NONE, keys)
    return best


@triton.jit
def _best_of_plain_rows(
    values, draft_id, inside, topk, SHORT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr
):
    if SHORT:
        short = _best_of_rows(
            tl.where(inside, short_key(values, draft_id), NO_SHORT_KEY), topk, NO_SHORT_KEY, BLOCK_W, BLOCK_K
        )
        best = tl.where(short == NO_SHORT_KEY, NO_KEY, lengthen_key(short, 0))
    else:
        best = _best_of_rows(
            tl.where(inside, rank_key(values, draft_id), NO_KEY), topk, NO_KEY, BLOCK_W, BLOCK_K
        )
    return best


@triton.jit(
    do_not_specialize=["columns", "first", "width", "column", "level"],
    do_not_specialize_on_alignment=["positions", "choices"],
)
def _level_whole(
    logits, row_stride, d2t, temperature, seeds, positions, choices, beam_scores, beam_candidates,
    beam_ancestors, scores, tokens, parents, logprobs, next_tokens, next_scores, next_parents,
    next_candidates, next_ancestors, vocab, columns, first, topk, width, words, column, level,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, SHORT: tl.constexpr, ROOTS: tl.constexpr, LAST: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Expand a sequence's rows over the whole vocabulary, store the children and select the next beam."""
    if PDL:
        gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_W)
    row = sequence * width + local
    real = local < width
    draft_id = tl.arange(0, BLOCK_V)
    there = real[:, None] & (draft_id < vocab)[None, :]
    ids = tl.zeros((BLOCK_W, BLOCK_V), tl.int32) + draft_id[None, :]
    plain = tl.load(
        logits + row[:, None] * row_stride + draft_id[None, :], mask=there, other=-float("inf")
    ).to(tl.float32)
    plain_total = _log_total(plain)
    total = plain_total
    if NOISE:
        heat = tl.load(temperature + sequence)
        if heat > 0:
            token = ids.to(tl.int64)
            if HAS_D2T:
                token += tl.load(d2t + draft_id, mask=draft_id < vocab, other=0)[None, :]
            position = tl.load(positions + sequence).to(tl.int64) + level
            # All rows of a level choose a token for the same position, so they share the noise of each token.
            noise = gumbel(tl.load(seeds + sequence), position, tl.load(choices + sequence), token)
            value = tl.where(there, tl.div_rn(plain, tl.zeros_like(plain) + heat) + noise, -float("inf"))
            total = _log_total(value)
            best = _best_of_rows(
                tl.where(there, rank_key(value, ids), NO_KEY), topk, NO_KEY, BLOCK_W, BLOCK_K
            )
        else:
            best = _best_of_plain_rows(plain, ids, there, topk, SHORT, BLOCK_W, BLOCK_K)
    else:
        best = _best_of_plain_rows(plain, ids, there, topk, SHORT, BLOCK_W, BLOCK_K)
    inside = real[:, None] & (tl.arange(0, BLOCK_K) < topk)[None, :]
    chosen = tl.where(inside, key_index(best), 0)
    child_token = chosen
    if HAS_D2T:
        child_token += tl.load(d2t + chosen, mask=inside, other=0).to(tl.int32)
    score = key_value(best) - total[:, None]
    logprob = score
    if NOISE:
        own = tl.load(logits + row[:, None] * row_stride + chosen, mask=inside, other=0.0).to(tl.float32)
        logprob = own - plain_total[:, None]
    if not ROOTS:
        score += tl.load(beam_scores + row, mask=real, other=0.0)[:, None]
    _note_and_pick(
        child_token, score, logprob, inside, sequence,
        _parents(beam_candidates, sequence, width, ROOTS, BLOCK_W), beam_ancestors, scores, tokens, parents,
        logprobs, next_tokens, next_scores, next_parents, next_candidates, next_ancestors, columns, first,
        topk, width, words, column, ROOTS, LAST, BLOCK_W, BLOCK_K, BLOCK_N, PDL
    )  # fmt: skip


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
    """Compute `outrider.kernels.topk_expand.expand_level` in one launch (small vocabulary) or two."""
    bs, columns = candidates.scores.shape
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()

    def integers(*shape: int) -> torch.Tensor:
        return _launch.empty(shape, torch.int32, device)

    wide = bs * topk
    following = Beam(
        integers(wide), _launch.empty((wide,), torch.float32, device), integers(wide), integers(wide),
        integers(wide, words)
    )  # fmt: skip
    if bs:
        width, vocab = logits.shape[0] // bs, logits.shape[1]
        offsets = logits if d2t is None else d2t.contiguous()
        above = following if beam is None else beam
        block_w, block_v = _launch.next_power_of_2(width), _launch.next_power_of_2(vocab)
        begin = candidates.level(level, topk).start
        kinds = {"NOISE": noise is not None, "HAS_D2T": d2t is not None, "ROOTS": beam is None, "LAST": last}
        blocks = {
            "BLOCK_W": block_w,
            "BLOCK_K": _launch.next_power_of_2(topk),
            "BLOCK_N": _launch.next_power_of_2(words),
        }
        with _launch.on_device_of(logits):
            heat, seeds, positions, choices = (
                (part.contiguous() for part in noise) if noise is not None else (logits,) * 4
            )
            if block_v <= MAX_BLOCK and width <= _WHOLE_ROWS:
                _level_whole[(bs,)](
                    logits, logits.stride(0), offsets, heat, seeds, positions, choices, above.scores,
                    above.candidates, above.ancestors, candidates.scores, candidates.tokens,
                    candidates.parents, candidates.logprobs, following.tokens, following.scores,
                    following.parents, following.candidates, following.ancestors, vocab, columns, begin, topk,
                    width, words, level * topk, level, SHORT=logits.dtype is torch.bfloat16, BLOCK_V=block_v,
                    **kinds, **blocks, num_warps=max(1, min(16, block_w * block_v // 256)), **UNFUSED,
                    **_launch.dependent(logits),
                )  # fmt: skip
            else:
                keys, shares = split_rows(logits, topk, width, level, None if d2t is None else offsets, noise)
                splits, narrow = keys.shape[1], narrow_keys(logits)
                block_c = _launch.next_power_of_2(splits * topk)
                _level_merge[(bs,)](
                    logits, logits.stride(0), offsets, heat, keys, shares, above.scores, above.candidates,
                    above.ancestors, candidates.scores, candidates.tokens, candidates.parents,
                    candidates.logprobs, following.tokens, following.scores, following.parents,
                    following.candidates, following.ancestors, columns, begin, splits, topk, width, words,
                    level * topk, SHORT=narrow, BLOCK_S=_launch.next_power_of_2(splits), BLOCK_C=block_c,
                    **kinds, **blocks, num_warps=1 if block_w * block_c <= (1024 if narrow else 256) else 4,
                    **UNFUSED, **_launch.dependent(logits),
                )  # fmt: skip
    return None if last else following
