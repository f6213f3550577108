"""Triton version of filtered_choice. The package documents the contract.

The vocabulary of each row is split over programs. The launches are:

    best          1 launch       finds the largest score of every part
    search top-k  4 (bf16) or 8  counts the tokens at or above each of 16 keys, which determines 4 bits of the
                                 k-th key
    search top-p  4 (bf16) or 8  sums the weights at or above each of 16 keys; the first launch also sums the
                                 weights above the k-th key
    bounds        1 launch       finds the key at the end of the shorter prefix, and counts the tokens with
                                 that key in every part
    choose        1 launch       finds the best kept token of every part, with noise

At its start, every program adds up the results that the previous launch stored for the parts of the program's
row, always in the same order. Rows without a filter skip the launches they do not need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels._order.triton import ordered_bits
from outrider.kernels.filtered_choice.types import Kept
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.verify.types import SamplingTensors

_BLOCK = 4096  # tokens of a part
_CHUNK = 1024  # tokens compared with all pivots at a time, which bounds the registers
_DIGIT = tl.constexpr(4)  # bits of the key that a launch determines
_PIVOTS = tl.constexpr(16)  # 2 ** _DIGIT
_TINY = tl.constexpr(1e-30)  # lower bound of the wanted mass, because the best token always stays


@triton.jit
def _scores(logits, row, row_stride, token, vocab, heat):
    """Return a block's logits, its scores (logits over temperature), and which logits are NaN or +inf.

    Logits and scores are -inf past the vocabulary and where the logit is NaN or +inf.
    """
    logit = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    bad = (logit != logit) | (logit == float("inf"))
    logit = tl.where(bad, -float("inf"), logit)
    return logit, tl.div_rn(logit, tl.zeros_like(logit) + heat), bad


@triton.jit
def _keys(logit, score, SHORT: tl.constexpr):
    """Return int32 keys in the order of the scores.

    With SHORT, the logits were bf16, and the keys have only 16 bits. Different bf16 logits have different
    scores at any temperature, so the bits of a logit can be its key.
    """
    return ordered_bits(logit) >> 16 if SHORT else ordered_bits(score)


@triton.jit
def _weight(key, heat, top, SHORT: tl.constexpr):
    """Return exp(score - top), a scalar, for the score that a key was computed from."""
    ordered = (key << 16) | tl.where(key < 0, 0xFFFF, 0) if SHORT else key
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((tl.div_rn(value, heat) if SHORT else value) - top)


@triton.jit
def _row_best(best, row, splits, SPLITS: tl.constexpr):
    """Return the row's largest score.

    If all scores are -inf, return 0, so that differences from the result stay defined.
    """
    split = tl.arange(0, SPLITS)
    top = tl.max(tl.load(best + row * splits + split, mask=split < splits, other=-float("inf")), 0)
    return tl.where(top > -float("inf"), top, 0.0)


@triton.jit
def _narrow(partials, bases, aboves, at, target, splits, shift, SPLITS: tl.constexpr):
    """Return the last launch's highest pivot whose sum is at least `target`, and the next higher pivot's sum.

    The sum of a pivot is the number (or total weight) of the tokens at or above the pivot.

    Args:
        at: Index of the launch and row in `bases` and `aboves`.
    """
    split, pivot = tl.arange(0, SPLITS)[:, None], tl.arange(0, _PIVOTS)
    found = tl.load(
        partials + (at * splits + split) * _PIVOTS + pivot[None, :], mask=split < splits, other=0.0
    )
    sums = tl.sum(found, 0)
    reached = tl.max(tl.where(sums >= target, pivot, 0), 0)
    beyond = tl.sum(tl.where(pivot == reached + 1, sums, 0.0), 0)
    above = tl.where(reached < _PIVOTS - 1, beyond, tl.load(aboves + at))
    return tl.load(bases + at) + (reached << shift), above


@triton.jit
def _mass_target(
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
        total += (k.to(tl.float32) - tl.load(aboves + kth)) * _weight(tl.load(bases + kth), heat, top, SHORT)
    return tl.maximum(p * total, _TINY)


@triton.jit
def _best_split(logits, row_stride, temperature, best, vocab, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    token = split * BLOCK + tl.arange(0, BLOCK)
    _, score, _ = _scores(logits, row, row_stride, token, vocab, tl.where(heat > 0, heat, 1.0))
    if PDL:
        gdc_launch_dependents()
    tl.store(best + row * splits + split, tl.max(score, 0))


@triton.jit(do_not_specialize=["rows", "step"])
def _search(
    logits, row_stride, temperature, top_k, top_p, best, bases, aboves, partials, masses, rows, vocab, splits, step,
    STEPS: tl.constexpr, SUMS: tl.constexpr, FIRST: tl.constexpr, SHORT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Run launch number `step` of the 2 · `STEPS` launches of the search.

    The first half counts tokens to find the end of top-k. The second half (`SUMS`) sums weights to find the
    end of top-p. `FIRST` marks the first launch of each half.
    """
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    LEAST: tl.constexpr = -(1 << 15) if SHORT else -(1 << 31)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    k_on = (heat > 0) & (k > 0) & (k < vocab)
    active = (heat > 0) & (p < 1) if SUMS else k_on
    if active:
        top = _row_best(best, row, splits, SPLITS)
        base, above = tl.full((), LEAST, tl.int32), tl.full((), 0.0, tl.float32)
        kth = tl.full((), LEAST, tl.int32)
        shift = _DIGIT * (STEPS - 1 - step % STEPS)
        last = (step - 1) * rows + row
        # 1. Narrow the range, using the sums of the previous launch.
        if not FIRST:
            target = k.to(tl.float32)
            if SUMS:
                target = _mass_target(
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
            base, above = _narrow(partials, bases, aboves, last, target, splits, shift + _DIGIT, SPLITS)
        # 2. At the start of the top-p search, finish the top-k search, whose result bounds the mass.
        if k_on & SUMS & FIRST:
            kth, beyond = _narrow(partials, bases, aboves, last, k.to(tl.float32), splits, 0, SPLITS)
            if split == 0:
                tl.store(bases + 2 * STEPS * rows + row, kth)
                tl.store(aboves + 2 * STEPS * rows + row, beyond)
        # 3. Sum up the tokens at or above each of the 16 pivots of this range.
        pivot = tl.arange(0, _PIVOTS)
        pivots = base + (pivot << shift)
        sums = tl.zeros((_PIVOTS, CHUNK), tl.float32)
        mass = tl.zeros((CHUNK,), tl.float32)
        for chunk in tl.static_range(BLOCK // CHUNK):
            token = split * BLOCK + chunk * CHUNK + tl.arange(0, CHUNK)
            logit, score, _ = _scores(logits, row, row_stride, token, vocab, heat)
            key = _keys(logit, score, SHORT)
            worth = tl.exp(score - top) if SUMS else tl.where(token < vocab, 1.0, 0.0)
            sums += tl.where(key[None, :] >= pivots[:, None], worth[None, :], 0.0)
            if SUMS and FIRST:
                mass += tl.where(key > kth, worth, 0.0)
        place = (step * rows + row) * splits + split
        tl.store(partials + place * _PIVOTS + pivot, tl.sum(sums, 1))
        if SUMS and FIRST:
            tl.store(masses + row * splits + split, tl.sum(mass, 0))
        if split == 0:
            tl.store(bases + step * rows + row, base)
            tl.store(aboves + step * rows + row, above)
    if PDL:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def _bounds(
    logits, row_stride, temperature, top_k, top_p, best, bases, aboves, partials, masses, keys, ties, tied, rows, vocab, splits,
    STEPS: tl.constexpr, SHORT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store each row's prefix end (key and ties), and the number of tokens with that key in each part."""
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    LEAST: tl.constexpr = -(1 << 15) if SHORT else -(1 << 31)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    k_on, p_on = (heat > 0) & (k > 0) & (k < vocab), (heat > 0) & (p < 1)
    key, stay = tl.full((), LEAST, tl.int32), tl.full((), 0, tl.int32)
    if k_on:
        key, above = _narrow(
            partials, bases, aboves, (STEPS - 1) * rows + row, k.to(tl.float32), splits, 0, SPLITS
        )
        stay = k - above.to(tl.int32)
    if p_on:
        top = _row_best(best, row, splits, SPLITS)
        target = _mass_target(
            masses, bases, aboves, 2 * STEPS * rows + row, row, splits, k, k_on, p, heat, top, SHORT, SPLITS
        )
        last, above = _narrow(
            partials, bases, aboves, (2 * STEPS - 1) * rows + row, target, splits, 0, SPLITS
        )
        weight = _weight(last, heat, top, SHORT)
        wanted = tl.ceil(tl.minimum((target - above) / tl.maximum(weight, _TINY), vocab.to(tl.float32)))
        some = tl.maximum(wanted.to(tl.int32), 1)  # at least the best token stays
        # Use the shorter prefix: the prefix with the higher key or, if the keys are equal, with fewer ties.
        stay = tl.where(last > key, some, tl.where(last == key, tl.minimum(some, stay), stay))
        key = tl.maximum(key, last)
    count = 0
    if k_on | p_on:
        token = split * BLOCK + tl.arange(0, BLOCK)
        logit, score, _ = _scores(logits, row, row_stride, token, vocab, heat)
        count = tl.sum(((_keys(logit, score, SHORT) == key) & (token < vocab)).to(tl.int32), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(tied + row * splits + split, count)
    if split == 0:
        tl.store(keys + row, key)
        tl.store(ties + row, stay)


@triton.jit
def _choose_split(
    logits, row_stride, temperature, min_p, seeds, positions, choices, best, keys, ties, tied, scores, ids, poisoned, vocab, splits,
    SHORT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    token = split * BLOCK + tl.arange(0, BLOCK)
    logit, score, bad = _scores(logits, row, row_stride, token, vocab, tl.where(heat > 0, heat, 1.0))
    if heat > 0:
        # Among ties, the lowest ids are kept, so rank this part's ties after the ties of earlier parts.
        other = tl.arange(0, SPLITS)
        before = tl.sum(tl.load(tied + row * splits + other, mask=other < split, other=0), 0)
        key, last = _keys(logit, score, SHORT), tl.load(keys + row)
        equal = (key == last) & (token < vocab)
        rank = before + tl.cumsum(equal.to(tl.int32), 0)
        kept = (key > last) | (equal & (rank <= tl.load(ties + row)))
        kept = kept & (tl.exp(score - _row_best(best, row, splits, SPLITS)) >= tl.load(min_p + row))
        noise = gumbel(tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), token)
        score = tl.where(kept, score + noise, -float("inf"))
    top = tl.max(score, 0)
    first = tl.min(tl.where(score == top, token, vocab), 0)
    out = row * splits + split
    if PDL:
        gdc_launch_dependents()
    tl.store(scores + out, top)
    tl.store(ids + out, first)
    tl.store(poisoned + out, tl.max(bad.to(tl.int32), 0))


@dataclass(frozen=True, slots=True)
class Parts:
    """Best kept token of every part of every row.

    Attributes:
        scores: ``[rows, splits] fp32``, the token's score with noise.
        ids: ``[rows, splits] int32``, the token.
        poisoned: ``[rows, splits] int32``, 1 if a logit of the part is NaN or +inf.
    """

    scores: torch.Tensor
    ids: torch.Tensor
    poisoned: torch.Tensor


class _Found:
    """Intermediate results passed from launch to launch."""

    def __init__(self, logits: torch.Tensor) -> None:
        rows, self.vocab = logits.shape
        self.splits = _launch.ceil_div(self.vocab, _BLOCK)
        self.short = logits.dtype is torch.bfloat16
        self.steps = (16 if self.short else 32) // _DIGIT.value
        device, launches = logits.device, 2 * self.steps
        self.best = _launch.empty((rows, self.splits), torch.float32, device)
        # One entry per launch, and a last entry for the result of the top-k search.
        self.bases = _launch.empty((launches + 1, rows), torch.int32, device)
        self.aboves = _launch.empty((launches + 1, rows), torch.float32, device)
        self.partials = _launch.empty((launches, rows, self.splits, _PIVOTS.value), torch.float32, device)
        self.masses = _launch.empty((rows, self.splits), torch.float32, device)
        self.keys = _launch.empty((rows,), torch.int32, device)
        self.ties = _launch.empty((rows,), torch.int32, device)
        self.tied = _launch.empty((rows, self.splits), torch.int32, device)


def _find(logits: torch.Tensor, sampling: SamplingTensors) -> _Found:
    """Run all launches up to and including `_bounds`."""
    rows, found = logits.shape[0], _Found(logits)
    temperature, top_k, top_p = (
        column.contiguous() for column in (sampling.temperature, sampling.top_k, sampling.top_p)
    )
    block = max(16, min(_BLOCK, _launch.next_power_of_2(found.vocab)))
    sizes = {
        "SPLITS": _launch.next_power_of_2(found.splits),
        "STEPS": found.steps,
        "SHORT": found.short,
        "BLOCK": block,
        "num_warps": 8,
    }
    sizes |= _launch.dependent(logits)
    grid, given = (rows, found.splits), (logits, logits.stride(0), temperature)
    _best_split[grid](
        *given, found.best, found.vocab, found.splits, BLOCK=block, num_warps=8, **_launch.dependent(logits)
    )
    left = (top_k, top_p, found.best, found.bases, found.aboves, found.partials, found.masses)
    for step in range(2 * found.steps):
        half = {"SUMS": step >= found.steps, "FIRST": step % found.steps == 0, "CHUNK": min(_CHUNK, block)}
        _search[grid](*given, *left, rows, found.vocab, found.splits, step, **half, **sizes)
    _bounds[grid](*given, *left, found.keys, found.ties, found.tied, rows, found.vocab, found.splits, **sizes)
    return found


def kept_tokens(logits: torch.Tensor, sampling: SamplingTensors) -> Kept:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    with _launch.on_device_of(logits):
        found = _find(logits, sampling)
    return Kept(found.keys, found.ties)


def best_kept(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> Parts:
    """Return the best kept token of every part of the vocabulary, noise included.

    The caller merges the parts.

    Args:
        logits: ``[rows, V]``, rows contiguous, at least one row.
        sampling: Sampling parameters, as in `choose_tokens`.
        positions: Positions of the tokens to choose, as in `choose_tokens`.
    """
    rows = logits.shape[0]
    with _launch.on_device_of(logits):
        found = _find(logits, sampling)
        size = (rows, found.splits)
        scores = _launch.empty(size, torch.float32, logits.device)
        ids, poisoned = (_launch.empty(size, torch.int32, logits.device) for _ in range(2))
        _choose_split[size](
            logits, logits.stride(0), sampling.temperature.contiguous(), sampling.min_p.contiguous(), sampling.seeds.contiguous(),
            positions.contiguous(), sampling.choices.contiguous(), found.best, found.keys, found.ties, found.tied, scores, ids, poisoned,
            found.vocab, found.splits, SHORT=found.short, SPLITS=_launch.next_power_of_2(found.splits),
            BLOCK=max(16, min(_BLOCK, _launch.next_power_of_2(found.vocab))), num_warps=8, **_launch.dependent(logits),
        )  # fmt: skip
    return Parts(scores, ids, poisoned)
