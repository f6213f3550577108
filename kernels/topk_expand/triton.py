"""topk_expand in Triton; the contract is in the package's docstring.

The vocabulary is split over programs: each reads its part of the logits once, adds the noise, and leaves its best keys and its share of the
two log-sum-exps (of the perturbed vector and of the plain one); a second launch merges the splits of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch
from outrider.kernels._order.triton import NO_KEY, best_keys, key_index, key_value, rank_key
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.topk_expand.types import Expansion, Noise

_BLOCK = 4096


@triton.jit
def _max_and_sum(values):
    """Return the maximum of a block and the sum of exp(value - maximum); (-inf, 0) for a block of -inf."""
    top = tl.max(values, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.sum(tl.exp(values - base), 0)


@triton.jit
def _log_sum_exp(tops, sums):
    """Merge the splits' (maximum, sum) pairs."""
    top = tl.max(tops, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    return top + tl.log(tl.sum(sums * tl.exp(tops - base), 0))


@triton.jit
def _expand_split(
    logits, row_stride, d2t, temperature, seeds, positions, choices, keys, shares, vocab, splits, topk,
    NOISE: tl.constexpr, HAS_D2T: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draft_id = split * BLOCK + tl.arange(0, BLOCK)
    inside = draft_id < vocab
    plain = tl.load(logits + row * row_stride + draft_id, mask=inside, other=-float("inf")).to(tl.float32)
    value = plain
    if NOISE:
        heat = tl.load(temperature + row)
        if heat > 0:
            token = draft_id.to(tl.int64)
            if HAS_D2T:
                token += tl.load(d2t + draft_id, mask=inside, other=0)
            noise = gumbel(tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), token)
            value = tl.div_rn(plain, tl.zeros_like(plain) + heat) + noise
    top, total = _max_and_sum(plain)
    noisy_top, noisy_total = _max_and_sum(value)
    share = shares + (row * splits + split) * 4
    tl.store(share, top)
    tl.store(share + 1, total)
    tl.store(share + 2, noisy_top)
    tl.store(share + 3, noisy_total)
    best = best_keys(tl.where(inside, rank_key(value, draft_id), NO_KEY), topk, BLOCK_K)
    place = tl.arange(0, BLOCK_K)
    tl.store(keys + (row * splits + split) * topk + place, best, mask=place < topk)


@triton.jit
def _expand_merge(
    logits, row_stride, parent_scores, d2t, keys, shares, tokens, scores, logprobs, splits, topk,
    HAS_D2T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    share = shares + (row * splits + split) * 4
    real = split < splits
    log_total = _log_sum_exp(tl.load(share, mask=real, other=-float("inf")), tl.load(share + 1, mask=real, other=0.0))
    noisy_log_total = _log_sum_exp(tl.load(share + 2, mask=real, other=-float("inf")), tl.load(share + 3, mask=real, other=0.0))
    candidate = tl.arange(0, BLOCK_C)
    best = best_keys(tl.load(keys + row * splits * topk + candidate, mask=candidate < splits * topk, other=NO_KEY), topk, BLOCK_K)
    place = tl.arange(0, BLOCK_K)
    inside = place < topk
    draft_id = key_index(best)
    token = draft_id
    if HAS_D2T:
        token += tl.load(d2t + draft_id, mask=inside, other=0).to(tl.int32)
    out = row * topk + place
    tl.store(tokens + out, token, mask=inside)
    tl.store(scores + out, tl.load(parent_scores + row) + (key_value(best) - noisy_log_total), mask=inside)
    plain = tl.load(logits + row * row_stride + draft_id, mask=inside, other=0.0).to(tl.float32)
    tl.store(logprobs + out, plain - log_total, mask=inside)


def topk_expand(logits: torch.Tensor, parent_scores: torch.Tensor, topk: int, d2t: torch.Tensor | None, noise: Noise | None) -> Expansion:
    """See `outrider.kernels.topk_expand.topk_expand`; `noise` is (temperature, seeds, positions, choices)."""
    rows, vocab = logits.shape
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = min(_BLOCK, _launch.next_power_of_2(vocab))
    splits = _launch.ceil_div(vocab, block)
    block_k = _launch.next_power_of_2(topk)
    keys = _launch.empty((rows, splits, topk), torch.int64, device)
    shares = _launch.empty((rows, splits, 4), torch.float32, device)
    tokens = _launch.empty((rows, topk), torch.int32, device)
    scores = _launch.empty((rows, topk), torch.float32, device)
    logprobs = _launch.empty((rows, topk), torch.float32, device)
    if rows:
        noisy = noise is not None
        heat, seeds, positions, choices = (part.contiguous() for part in noise) if noise is not None else (logits,) * 4
        offsets = logits if d2t is None else d2t.contiguous()
        with _launch.on_device_of(logits):
            _expand_split[(rows, splits)](
                logits, logits.stride(0), offsets, heat, seeds, positions, choices, keys, shares, vocab, splits, topk,
                NOISE=noisy, HAS_D2T=d2t is not None, BLOCK=block, BLOCK_K=block_k, num_warps=8,
            )  # fmt: skip
            _expand_merge[(rows,)](
                logits, logits.stride(0), parent_scores.contiguous(), offsets, keys, shares, tokens, scores, logprobs, splits, topk,
                HAS_D2T=d2t is not None, BLOCK_S=_launch.next_power_of_2(splits), BLOCK_C=_launch.next_power_of_2(splits * topk),
                BLOCK_K=block_k, num_warps=4,
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
