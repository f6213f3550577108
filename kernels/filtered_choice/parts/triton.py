"""Triton functions that do the work of filtered_choice for one part of a row's vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels._order.triton import ordered_bits

DIGIT = tl.constexpr(4)
"""Bits of a key that a search launch determines."""
PIVOTS = tl.constexpr(16)  # 2 ** DIGIT
_TINY = tl.constexpr(1e-30)  # lower bound of the wanted mass, because the best token always stays


@triton.jit
def part_scores(logits, row, row_stride, token, vocab, heat):
    """Return a block's logits, its scores (logits over temperature), and which logits are NaN or +inf.

    Logits and scores are -inf past the vocabulary and where the logit is NaN or +inf.
    """
    logit = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    bad = (logit != logit) | (logit == float("inf"))
    logit = tl.where(bad, -float("inf"), logit)
    return logit, tl.div_rn(logit, tl.zeros_like(logit) + heat), bad


@triton.jit
def score_keys(logit, score, SHORT: tl.constexpr):
    """Map each score to an int32 key. The keys have the same order as the scores.

    With SHORT, the logits were bf16, and the keys have only 16 bits. Different bf16 logits have different
    scores at any temperature, so the bits of a logit can be its key.
    """
    return ordered_bits(logit) >> 16 if SHORT else ordered_bits(score)


@triton.jit
def key_weight(key, heat, top, SHORT: tl.constexpr):
    """Return exp(score - top), a scalar, for the score that a key was computed from."""
    ordered = (key << 16) | tl.where(key < 0, 0xFFFF, 0) if SHORT else key
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((tl.div_rn(value, heat) if SHORT else value) - top)


@triton.jit
def row_best(best, row, splits, SPLITS: tl.constexpr):
    """Return the row's largest score.

    If all scores are -inf, return 0, so that differences from the result stay defined.
    """
    split = tl.arange(0, SPLITS)
    top = tl.max(tl.load(best + row * splits + split, mask=split < splits, other=-float("inf")), 0)
    return tl.where(top > -float("inf"), top, 0.0)


@triton.jit
def narrow(partials, bases, aboves, at, target, splits, shift, SPLITS: tl.constexpr):
    """Return the last launch's highest pivot whose sum is at least `target`, and the next higher pivot's sum.

    The sum of a pivot is the number (or total weight) of the tokens at or above the pivot.

    Args:
        at: Index of the launch and row in `bases` and `aboves`.
    """
    split, pivot = tl.arange(0, SPLITS)[:, None], tl.arange(0, PIVOTS)
    found = tl.load(
        partials + (at * splits + split) * PIVOTS + pivot[None, :], mask=split < splits, other=0.0
    )
    sums = tl.sum(found, 0)
    reached = tl.max(tl.where(sums >= target, pivot, 0), 0)
    beyond = tl.sum(tl.where(pivot == reached + 1, sums, 0.0), 0)
    above = tl.where(reached < PIVOTS - 1, beyond, tl.load(aboves + at))
    return tl.load(bases + at) + (reached << shift), above


@triton.jit
def mass_target(
    masses, bases, aboves, kth, row, splits, k, k_on, p, heat, top, SHORT: tl.constexpr, SPLITS: tl.constexpr
):
    """Return the mass that top-p keeps, which is p times the mass that top-k keeps.

    Masses are in units of the best token's weight.

    Args:
        kth: Index in `bases` and `aboves` of the final result of the top-k search.
    """
    split = tl.arange(0, SPLITS)
    total = tl.sum(tl.load(masses + row * splits + split, mask=split < splits, other=0.0), 0)
    if k_on:
        # Top-k keeps only some of the tokens that have exactly the k-th key.
        total += (k.to(tl.float32) - tl.load(aboves + kth)) * key_weight(
            tl.load(bases + kth), heat, top, SHORT
        )
    return tl.maximum(p * total, _TINY)


@triton.jit
def search_part(
    logits, row_stride, temperature, top_k, top_p, best, bases, aboves, partials, masses, rows, vocab, splits,
    step, row, split,
    STEPS: tl.constexpr, SUMS: tl.constexpr, FIRST: tl.constexpr, SHORT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Do the work of one part of a row in search launch `step`."""
    LEAST: tl.constexpr = -(1 << 15) if SHORT else -(1 << 31)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    k_on = (heat > 0) & (k > 0) & (k < vocab)
    active = (heat > 0) & (p < 1) if SUMS else k_on
    if active:
        top = row_best(best, row, splits, SPLITS)
        base, above = tl.full((), LEAST, tl.int32), tl.full((), 0.0, tl.float32)
        kth = tl.full((), LEAST, tl.int32)
        shift = DIGIT * (STEPS - 1 - step % STEPS)
        last = (step - 1) * rows + row
        # 1. Narrow the range, using the sums of the previous launch.
        if not FIRST:
            target = k.to(tl.float32)
            if SUMS:
                target = mass_target(
                    masses,
                    bases,
                    aboves,
                    2 * STEPS * rows + row,
                    row,
                    splits,
                    k,
                    k_on,
                    p,
                    heat,
                    top,
                    SHORT,
                    SPLITS,
                )
            base, above = narrow(partials, bases, aboves, last, target, splits, shift + DIGIT, SPLITS)
        # 2. At the start of the top-p search, finish the top-k search, whose result bounds the mass.
        if k_on & SUMS & FIRST:
            kth, beyond = narrow(partials, bases, aboves, last, k.to(tl.float32), splits, 0, SPLITS)
            if split == 0:
                tl.store(bases + 2 * STEPS * rows + row, kth)
                tl.store(aboves + 2 * STEPS * rows + row, beyond)
        # 3. Sum up the tokens at or above each of the 16 pivots of this range.
        pivot = tl.arange(0, PIVOTS)
        pivots = base + (pivot << shift)
        sums = tl.zeros((PIVOTS, CHUNK), tl.float32)
        mass = tl.zeros((CHUNK,), tl.float32)
        for chunk in tl.static_range(BLOCK // CHUNK):
            token = split * BLOCK + chunk * CHUNK + tl.arange(0, CHUNK)
            logit, score, _ = part_scores(logits, row, row_stride, token, vocab, heat)
            key = score_keys(logit, score, SHORT)
            worth = tl.exp(score - top) if SUMS else tl.where(token < vocab, 1.0, 0.0)
            sums += tl.where(key[None, :] >= pivots[:, None], worth[None, :], 0.0)
            if SUMS and FIRST:
                mass += tl.where(key > kth, worth, 0.0)
        place = (step * rows + row) * splits + split
        tl.store(partials + place * PIVOTS + pivot, tl.sum(sums, 1))
        if SUMS and FIRST:
            tl.store(masses + row * splits + split, tl.sum(mass, 0))
        if split == 0:
            tl.store(bases + step * rows + row, base)
            tl.store(aboves + step * rows + row, above)


@triton.jit
def bounds_of_part(
    logits, row_stride, temperature, top_k, top_p, best, bases, aboves, partials, masses, keys, ties, tied,
    rows, vocab, splits, row, split,
    STEPS: tl.constexpr, SHORT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Do the work of one part of a row in `_bounds`."""
    LEAST: tl.constexpr = -(1 << 15) if SHORT else -(1 << 31)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    k_on, p_on = (heat > 0) & (k > 0) & (k < vocab), (heat > 0) & (p < 1)
    key, stay = tl.full((), LEAST, tl.int32), tl.full((), 0, tl.int32)
    if k_on:
        key, above = narrow(
            partials, bases, aboves, (STEPS - 1) * rows + row, k.to(tl.float32), splits, 0, SPLITS
        )
        stay = k - above.to(tl.int32)
    if p_on:
        top = row_best(best, row, splits, SPLITS)
        target = mass_target(
            masses, bases, aboves, 2 * STEPS * rows + row, row, splits, k, k_on, p, heat, top, SHORT, SPLITS
        )
        last, above = narrow(partials, bases, aboves, (2 * STEPS - 1) * rows + row, target, splits, 0, SPLITS)
        weight = key_weight(last, heat, top, SHORT)
        wanted = tl.ceil(tl.minimum((target - above) / tl.maximum(weight, _TINY), vocab.to(tl.float32)))
        some = tl.maximum(wanted.to(tl.int32), 1)  # at least the best token stays
        # The shorter prefix wins. Its key is higher or, if the keys are equal, it has fewer ties.
        stay = tl.where(last > key, some, tl.where(last == key, tl.minimum(some, stay), stay))
        key = tl.maximum(key, last)
    count = 0
    if k_on | p_on:
        token = split * BLOCK + tl.arange(0, BLOCK)
        logit, score, _ = part_scores(logits, row, row_stride, token, vocab, heat)
        count = tl.sum(((score_keys(logit, score, SHORT) == key) & (token < vocab)).to(tl.int32), 0)
    tl.store(tied + row * splits + split, count)
    if split == 0:
        tl.store(keys + row, key)
        tl.store(ties + row, stay)
