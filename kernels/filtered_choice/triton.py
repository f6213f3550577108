"""Triton version of filtered_choice. `kernels.filtered_choice` documents the op.

The vocabulary of each row is split into parts, which are distributed over programs. The launches are:

    list          1 launch       lists the rows with a filter
    best          1 launch       finds the largest score of every part
    search top-k  4 (bf16) or 8  counts the tokens at or above each of 16 keys, which determines 4 bits of the
                                 k-th key
    search top-p  4 (bf16) or 8  sums the weights at or above each of 16 keys; the first launch also sums the
                                 weights above the k-th key
    bounds        1 launch       finds the key at the end of the shorter prefix, and counts the tokens with
                                 that key in every part
    choose        1 launch       finds the best kept token of every part, with noise

Before it processes a part, a program adds up the previous launch's results for this row. The order of this
sum is fixed.

All launches except the first and the last process the listed rows only. Only the last launch reads a row
without a filter. If few rows have a filter, the other launches therefore cost little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.filtered_choice.parts.triton import (
    DIGIT,
    PIVOTS,
    bounds_of_part,
    part_scores,
    row_best,
    score_keys,
    search_part,
)
from outrider.kernels.filtered_choice.types import Kept
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.verify.types import SamplingTensors

_BLOCK = 4096  # tokens of a part
_CHUNK = 1024  # tokens compared with all pivots at a time, which bounds the registers
_LISTED = 1024  # rows that the program of the list reads at a time
_PROGRAMS = 1024  # largest number of programs of a launch over the listed rows


@triton.jit(do_not_specialize=["rows"])
def _list_filtered(
    temperature, top_k, top_p, min_p, listed, filtered, keys, ties, rows, vocab,
    SHORT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store the number of rows with a filter and then their numbers in `listed`, and a flag for every row.

    Rows without a filter keep all tokens.
    """
    if PDL:
        gdc_wait()
    LEAST: tl.constexpr = -(1 << 15) if SHORT else -(1 << 31)
    count = 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        heat = tl.load(temperature + row, mask=inside, other=0.0)
        k = tl.load(top_k + row, mask=inside, other=0)
        p = tl.load(top_p + row, mask=inside, other=1.0)
        least = tl.load(min_p + row, mask=inside, other=0.0)
        on = (heat > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (least > 0))
        tl.store(listed + count + tl.cumsum(on.to(tl.int32), 0), row, mask=on)
        tl.store(filtered + row, on.to(tl.int32), mask=inside)
        tl.store(keys + row, tl.full((BLOCK,), LEAST, tl.int32), mask=inside & (on == 0))
        tl.store(ties + row, tl.zeros((BLOCK,), tl.int32), mask=inside & (on == 0))
        count += tl.sum(on.to(tl.int32), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(listed, count)


@triton.jit
def _best_split(
    logits, row_stride, temperature, listed, best, vocab, splits, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    for part in range(tl.program_id(0), tl.load(listed) * splits, tl.num_programs(0)):
        row, split = tl.load(listed + 1 + part // splits).to(tl.int64), part % splits
        token = split * BLOCK + tl.arange(0, BLOCK)
        _, score, _ = part_scores(logits, row, row_stride, token, vocab, tl.load(temperature + row))
        tl.store(best + row * splits + split, tl.max(score, 0))
    if PDL:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows", "step"])
def _search(
    logits, row_stride, temperature, listed, top_k, top_p, best, bases, aboves, partials, masses, rows, vocab,
    splits, step,
    STEPS: tl.constexpr, SUMS: tl.constexpr, FIRST: tl.constexpr, SHORT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Run search launch `step`, one of 2 · `STEPS`.

    The first half counts tokens to find the end of top-k. The second half (`SUMS`) sums weights to find the
    end of top-p. `FIRST` marks the first launch of each half.
    """
    if PDL:
        gdc_wait()
    for part in range(tl.program_id(0), tl.load(listed) * splits, tl.num_programs(0)):
        row = tl.load(listed + 1 + part // splits).to(tl.int64)
        search_part(
            logits, row_stride, temperature, top_k, top_p, best, bases, aboves, partials, masses, rows, vocab,
            splits, step, row, part % splits, STEPS, SUMS, FIRST, SHORT, SPLITS, BLOCK, CHUNK,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def _bounds(
    logits, row_stride, temperature, listed, top_k, top_p, best, bases, aboves, partials, masses, keys, ties,
    tied, rows, vocab, splits,
    STEPS: tl.constexpr, SHORT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Store each row's prefix end (key and ties), and the number of tokens with that key in each part."""
    if PDL:
        gdc_wait()
    for part in range(tl.program_id(0), tl.load(listed) * splits, tl.num_programs(0)):
        row = tl.load(listed + 1 + part // splits).to(tl.int64)
        bounds_of_part(
            logits, row_stride, temperature, top_k, top_p, best, bases, aboves, partials, masses, keys, ties,
            tied, rows, vocab, splits, row, part % splits, STEPS, SHORT, SPLITS, BLOCK,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _choose_split(
    logits, row_stride, temperature, filtered, min_p, seeds, positions, choices, best, keys, ties, tied,
    scores, ids, poisoned, vocab, splits, SHORT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    token = split * BLOCK + tl.arange(0, BLOCK)
    logit, score, bad = part_scores(logits, row, row_stride, token, vocab, tl.where(heat > 0, heat, 1.0))
    if heat > 0:
        if tl.load(filtered + row) > 0:
            # Ties with the lowest ids stay, so rank this part's ties after the ties of earlier parts.
            other = tl.arange(0, SPLITS)
            before = tl.sum(tl.load(tied + row * splits + other, mask=other < split, other=0), 0)
            key, last = score_keys(logit, score, SHORT), tl.load(keys + row)
            equal = (key == last) & (token < vocab)
            rank = before + tl.cumsum(equal.to(tl.int32), 0)
            kept = (key > last) | (equal & (rank <= tl.load(ties + row)))
            kept = kept & (tl.exp(score - row_best(best, row, splits, SPLITS)) >= tl.load(min_p + row))
            score = tl.where(kept, score, -float("inf"))
        score += gumbel(tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), token)
    top = tl.max(score, 0)
    first = tl.min(tl.where(score == top, token, vocab), 0)
    out = row * splits + split
    if PDL:
        gdc_launch_dependents()
    tl.store(scores + out, top)
    tl.store(ids + out, first)
    tl.store(poisoned + out, tl.max(bad.to(tl.int32), 0))


@dataclass(frozen=True, slots=True)
class PartChoices:
    """Best kept token of every part of the vocabulary, for every row.

    Attributes:
        scores: ``[rows, splits] fp32``, score of the best token of each part, including noise.
        ids: ``[rows, splits] int32``, id of this token.
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
        self.steps = (16 if self.short else 32) // DIGIT.value
        device, launches = logits.device, 2 * self.steps
        self.best = _launch.empty((rows, self.splits), torch.float32, device)
        # One entry per launch, and a last entry for the result of the top-k search.
        self.bases = _launch.empty((launches + 1, rows), torch.int32, device)
        self.aboves = _launch.empty((launches + 1, rows), torch.float32, device)
        self.partials = _launch.empty((launches, rows, self.splits, PIVOTS.value), torch.float32, device)
        self.masses = _launch.empty((rows, self.splits), torch.float32, device)
        self.keys = _launch.empty((rows,), torch.int32, device)
        self.ties = _launch.empty((rows,), torch.int32, device)
        self.tied = _launch.empty((rows, self.splits), torch.int32, device)
        self.listed = _launch.empty((1 + rows,), torch.int32, device)  # the number of rows, then the rows
        self.filtered = _launch.empty((rows,), torch.int32, device)


def _find(logits: torch.Tensor, sampling: SamplingTensors) -> _Found:
    """Run all launches up to and including `_bounds`."""
    rows, found = logits.shape[0], _Found(logits)
    temperature, top_k, top_p, min_p = (
        column.contiguous()
        for column in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    )
    block = max(16, min(_BLOCK, _launch.next_power_of_2(found.vocab)))
    sizes = {
        "SPLITS": _launch.next_power_of_2(found.splits),
        "STEPS": found.steps,
        "SHORT": found.short,
        "BLOCK": block,
        "num_warps": 8,
    }
    dependent = _launch.dependent(logits)
    sizes |= dependent
    _list_filtered[(1,)](
        temperature, top_k, top_p, min_p, found.listed, found.filtered, found.keys, found.ties, rows,
        found.vocab,
        SHORT=found.short, BLOCK=_LISTED, num_warps=4, **dependent,
    )  # fmt: skip
    grid = (min(rows * found.splits, _PROGRAMS),)
    given = (logits, logits.stride(0), temperature, found.listed)
    _best_split[grid](*given, found.best, found.vocab, found.splits, BLOCK=block, num_warps=8, **dependent)
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


def best_kept(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> PartChoices:
    """Return the best token that the filters keep, for every part of the vocabulary and every row.

    Scores include noise. The caller merges the parts.

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
            logits, logits.stride(0), sampling.temperature.contiguous(), found.filtered,
            sampling.min_p.contiguous(), sampling.seeds.contiguous(), positions.contiguous(),
            sampling.choices.contiguous(), found.best, found.keys, found.ties, found.tied, scores, ids,
            poisoned, found.vocab, found.splits, SHORT=found.short,
            SPLITS=_launch.next_power_of_2(found.splits),
            BLOCK=max(16, min(_BLOCK, _launch.next_power_of_2(found.vocab))), num_warps=8,
            **_launch.dependent(logits),
        )  # fmt: skip
    return PartChoices(scores, ids, poisoned)
