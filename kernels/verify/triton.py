"""Triton version of verify. `kernels.verify` documents the ops.

- Choosing a token takes two launches. The first finds the argmax of each split of the vocabulary, with noise
  if needed. The second merges the splits.
- If a row with temperature above 0 has a filter (top-k, top-p or min-p), the launches of `filtered_choice`
  replace the first launch. They apply the filters by search.
- On each device, a check first compares the search with sorting (`_searches`). Until the search has passed
  this check, `filters.py` applies the filters by sorting, before the two launches of the first item. The
  check cannot run while a CUDA graph is being captured.
- The walk through the tree is one launch.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.ahead import rehearsing
from outrider.kernels.filtered_choice.triton import PartChoices, best_kept
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.verify.filters import filter_logits
from outrider.kernels.verify.types import SamplingTensors, VerifiedTree

_BLOCK = 4096
_MANY_ROWS, _LONG_BLOCK = 64, 8192
"""Least number of rows for which choosing greedy tokens takes two steps, to reduce the work per logit.

The maximum of each block of `_LONG_BLOCK` tokens is found first. The index of the maximum is then searched in
a single block."""

_log = logging.getLogger("outrider.kernels")

_agreed: dict[tuple[torch.device, torch.dtype, int], bool] = {}  # True if search and sorting agree


@triton.jit
def _argmax_split(
    logits, row_stride, temperature, seeds, positions, choices, best, ids, poisoned, chosen, vocab, splits,
    NOISE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    bad = (score != score) | (score == float("inf"))
    if NOISE:
        heat = tl.load(temperature + row)
        if heat > 0:
            score = tl.div_rn(score, tl.zeros_like(score) + heat)
            score += gumbel(tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), token)
    score = tl.where(bad, -float("inf"), score)
    top = tl.max(score, 0)
    first = tl.min(tl.where(score == top, token, vocab), 0)
    spoiled = tl.max(bad.to(tl.int32), 0)
    out = row * splits + split
    if PDL:
        gdc_launch_dependents()
    if WHOLE:
        tl.store(chosen + row, tl.where((spoiled > 0) | (top == -float("inf")), -1, first).to(tl.int64))
    else:
        tl.store(best + out, top)
        tl.store(ids + out, first)
        tl.store(poisoned + out, spoiled)


@triton.jit
def _argmax_merge(best, ids, poisoned, chosen, vocab, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    scores = tl.load(best + row * splits + split, mask=inside, other=-float("inf"))
    tokens = tl.load(ids + row * splits + split, mask=inside, other=vocab)
    bad = tl.max(tl.load(poisoned + row * splits + split, mask=inside, other=0), 0)
    top = tl.max(scores, 0)
    token = tl.min(tl.where(scores == top, tokens, vocab), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(chosen + row, tl.where((bad > 0) | (top == -float("inf")), -1, token).to(tl.int64))


@triton.jit
def _maxima(logits, row_stride, best, vocab, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Find the maximum of each block of a row; a NaN counts as +inf."""
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    top = tl.max(tl.where(score < float("inf"), score, float("inf")), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(best + row * splits + split, top)


@triton.jit
def _first_maximum(
    logits,
    row_stride,
    best,
    chosen,
    vocab,
    splits,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the first token with the row's maximum, in the first block that contains it."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    maxima = tl.load(best + row * splits + split, mask=split < splits, other=-float("inf"))
    top = tl.max(maxima, 0)
    token = tl.min(tl.where(maxima == top, split, splits - 1), 0) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    first = tl.min(tl.where(score == top, token, vocab), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(chosen + row, tl.where(tl.abs(top) == float("inf"), -1, first).to(tl.int64))


def choose_tokens(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
    filtered = sampling.any_filter and not sampling.all_greedy
    return _choose(logits, sampling, positions, filtered, filtered and _searches(logits))


def _choose(
    logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor, filtered: bool, search: bool
) -> torch.Tensor:
    """Choose one token per row. If `filtered`, apply the filters by search if `search`, else by sorting."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = _launch.empty((rows,), torch.int64, logits.device)
    if rows == 0:
        return chosen
    if sampling.all_greedy and rows >= _MANY_ROWS and vocab > _LONG_BLOCK:
        return _argmax(logits, chosen)
    if search:
        parts = best_kept(logits, sampling, positions)
    else:
        logits, sampling = _sorted(logits, sampling) if filtered else (logits, sampling)
        parts = _best(logits, sampling, positions, chosen)
        if vocab <= _BLOCK:
            return chosen
    splits = parts.ids.shape[1]
    with _launch.on_device_of(logits):
        _argmax_merge[(rows,)](
            parts.scores, parts.ids, parts.poisoned, chosen, vocab, splits,
            BLOCK=_launch.next_power_of_2(splits), num_warps=1, **_launch.dependent(logits),
        )  # fmt: skip
    return chosen


def _sorted(logits: torch.Tensor, sampling: SamplingTensors) -> tuple[torch.Tensor, SamplingTensors]:
    """Filter the rows by sorting.

    Return the filtered rows, and the parameters for choosing tokens from these rows.
    """
    heat = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    filtered = filter_logits(logits.float() / heat[:, None], sampling.top_k, sampling.top_p, sampling.min_p)
    # The scores are already divided by the temperature: sample them at temperature 1.
    return filtered, replace(sampling, temperature=(sampling.temperature > 0).float())


def _searches(logits: torch.Tensor) -> bool:
    """Return True if filters are applied by search (`filtered_choice`), False if by sorting (`filters.py`).

    On a GPU, the search is used only after it has passed a check, once per device, dtype and vocabulary size:
    it must choose the same tokens as sorting. The check cannot run while a CUDA graph is being captured, so
    an unchecked search is not used then. Triton's interpreter always uses the search.
    """
    if not logits.is_cuda:
        return True
    kind = (logits.device, logits.dtype, logits.shape[1])
    if kind not in _agreed:
        if rehearsing():  # kernels are skipped, so the check would compare zeros
            return True
        if torch.cuda.is_current_stream_capturing():  # the check cannot run during capture
            return False
        try:
            _agreed[kind] = _agrees(*kind)
        except Exception:
            _log.exception("filters are applied by sorting, because the search failed on this device")
            _agreed[kind] = False
    return _agreed[kind]


def _agrees(device: torch.device, dtype: torch.dtype, vocab: int) -> bool:
    """Choose from synthetic rows by search and by sorting, and return whether the tokens are equal."""
    kinds = [
        (0, 0.9, 0.0),
        (40, 1.0, 0.0),
        (20, 0.8, 0.0),
        (0, 1.0, 0.05),
        (50, 0.95, 0.02),
        (0, 0.5, 0.0),
        (1, 1.0, 0.0),
        (0, 1.0, 0.0),
    ]
    top_k, top_p, min_p = zip(*kinds, strict=True)
    rows = len(kinds)
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(device, dtype)
    sampling = SamplingTensors(
        temperature=torch.full((rows,), 0.8, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, device=device),
        min_p=torch.tensor(min_p, device=device),
        seeds=torch.arange(rows, device=device) * 7919,
        choices=torch.zeros(rows, dtype=torch.int32, device=device),
        all_greedy=False,
        any_filter=True,
    )
    positions = torch.arange(rows, device=device)
    searched, by_sorting = (
        _choose(logits, sampling, positions, True, search).tolist() for search in (True, False)
    )
    if searched != by_sorting:
        _log.error("filters are applied by sorting: the search chose %s, sorting %s", searched, by_sorting)
    return searched == by_sorting


def _argmax(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Write the best token of every row to `chosen`, in two passes."""
    rows, vocab = logits.shape
    splits = _launch.ceil_div(vocab, _LONG_BLOCK)
    best = _launch.empty((rows, splits), torch.float32, logits.device)
    sizes = {"BLOCK": _LONG_BLOCK, "num_warps": 8, **_launch.dependent(logits)}
    with _launch.on_device_of(logits):
        _maxima[(rows, splits)](logits, logits.stride(0), best, vocab, splits, **sizes)
        _first_maximum[(rows,)](
            logits, logits.stride(0), best, chosen, vocab, splits, SPLITS=_launch.next_power_of_2(splits),
            **sizes
        )  # fmt: skip
    return chosen


def _best(
    logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor, chosen: torch.Tensor
) -> PartChoices:
    """Return the best token of every part of the vocabulary, for every row. Scores include noise.

    If the vocabulary is a single part, the chosen tokens are written to `chosen` instead.
    """
    rows, vocab = logits.shape
    size = (rows, _launch.ceil_div(vocab, _BLOCK))
    scores = _launch.empty(size, torch.float32, logits.device)
    ids, poisoned = (_launch.empty(size, torch.int32, logits.device) for _ in range(2))
    with _launch.on_device_of(logits):
        _argmax_split[size](
            logits, logits.stride(0), sampling.temperature.contiguous(), sampling.seeds.contiguous(),
            positions.contiguous(), sampling.choices.contiguous(), scores, ids, poisoned, chosen, vocab,
            size[1], NOISE=not sampling.all_greedy, WHOLE=vocab <= _BLOCK,
            BLOCK=min(_BLOCK, _launch.next_power_of_2(vocab)), num_warps=8, **_launch.dependent(logits),
        )  # fmt: skip
    return PartChoices(scores, ids, poisoned)


@triton.jit
def walk_tree(tokens, parents, chosen, row, num_nodes, columns, BLOCK: tl.constexpr):
    """Return the path, the emitted tokens and the number of accepted drafts.

    The path and the emitted tokens are ``[BLOCK]``, padded with -1.
    """
    node = tl.arange(0, BLOCK)
    inside = node < columns
    token = tl.load(tokens + row * columns + node, mask=inside, other=-1)
    parent = tl.load(parents + row * columns + node, mask=inside, other=-1)
    after = tl.load(chosen + row * columns + node, mask=inside, other=-1).to(tl.int32)
    real = inside & (node < num_nodes) & (node > 0)
    at = tl.min(node, 0)
    wanted = tl.sum(tl.where(node == at, after, 0), 0)
    accepted = at
    walked = tl.where(node == 0, 0, -1)
    said = tl.where(node == 0, wanted, -1)
    child = tl.min(tl.where(real & (parent == at) & (token == wanted), node, BLOCK), 0)
    while child < BLOCK:
        at = child
        accepted += 1
        wanted = tl.sum(tl.where(node == at, after, 0), 0)
        walked = tl.where(node == accepted, at, walked)
        said = tl.where(node == accepted, wanted, said)
        child = tl.min(tl.where(real & (node > at) & (parent == at) & (token == wanted), node, BLOCK), 0)
    return walked, said, accepted


@triton.jit
def _walk(
    tokens,
    parents,
    num_nodes,
    chosen,
    path,
    num_accepted,
    emitted,
    columns,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    walked, said, accepted = walk_tree(tokens, parents, chosen, row, tl.load(num_nodes + row), columns, BLOCK)
    if PDL:
        gdc_launch_dependents()
    node = tl.arange(0, BLOCK)
    inside = node < columns
    tl.store(path + row * columns + node, walked, mask=inside)
    tl.store(emitted + row * columns + node, said, mask=inside)
    tl.store(num_accepted + row, accepted)


def verify_tree(
    tokens: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor, chosen: torch.Tensor
) -> VerifiedTree:
    bs, columns = tokens.shape
    path = _launch.empty((bs, columns), torch.int32, tokens.device)
    num_accepted = _launch.empty((bs,), torch.int32, tokens.device)
    emitted = _launch.empty((bs, columns), torch.int32, tokens.device)
    if bs:
        with _launch.on_device_of(tokens):
            _walk[(bs,)](
                tokens.contiguous(), parents.contiguous(), num_nodes.contiguous(), chosen.contiguous(), path,
                num_accepted, emitted, columns, BLOCK=_launch.next_power_of_2(columns), num_warps=1,
                **_launch.dependent(tokens),
            )  # fmt: skip
    return VerifiedTree(path=path, num_accepted=num_accepted, emitted=emitted)
