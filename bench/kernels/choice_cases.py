"""Cases of `outrider bench kernels` for the choice of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from outrider.bench.kernels.case import KernelCase, KernelOptions, over
from outrider.bench.kernels.inputs import KernelSizes, copies_for, sampling
from outrider.bench.measure.floors import Work
from outrider.kernels.filtered_choice import kept_tokens
from outrider.kernels.philox import gumbel_noise
from outrider.kernels.verify import SamplingTensors, choose_tokens

MIXED_ROWS = (1, 32, 64, 256)
MIXED_VOCAB = 128_256
"""Vocabulary of Llama 3."""


def mixed_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield cases that choose tokens for batches in which no row, one row in 32, or every row has filters.

    To see how much one request with filters slows the others down, compare the greedy batch without filters
    with the greedy batch in which one row in 32 has filters.
    """
    vocab = sizes.vocab if options.small else MIXED_VOCAB
    for rows in (1, 5) if options.small else MIXED_ROWS:
        logits = sizes.random(rows, vocab)
        copies = copies_for(logits.nbytes, options.small)
        many = [logits.clone() for _ in range(copies)]
        positions = torch.arange(rows, device=sizes.device)
        for name, how in (
            ("greedy", sampling(sizes, rows, 0.0)),
            ("noise", sampling(sizes, rows, 1.0)),
            ("filtered", _filtered(sizes, rows, rows)),
            ("1 in 32 filtered", _filtered(sizes, rows, max(1, rows // 32))),
        ):
            yield KernelCase(
                f"choose_tokens {name}, {rows} rows of {vocab}",
                over(many, partial(_choose_by, how, positions)),
                Work(logits.nbytes, 0.0),
                copies,
            )


def _filtered(sizes: KernelSizes, rows: int, count: int) -> SamplingTensors:
    """Return sampling parameters of greedy rows, of which `count` evenly spaced ones have top-k and top-p."""
    on = torch.arange(rows, device=sizes.device) % (rows // count) == 0
    return replace(
        sampling(sizes, rows, 1.0),
        temperature=on.float(),
        top_k=torch.where(on, 50, 0).to(torch.int32),
        top_p=torch.where(on, 0.9, 1.0),
        any_filter=True,
    )


def choose_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the choice of tokens in batches whose rows are alike."""
    for rows in sizes.rows:
        logits = sizes.random(rows, sizes.vocab)
        nbytes = logits.nbytes
        copies = copies_for(nbytes, options.small)
        many = [logits.clone() for _ in range(copies)]
        positions = torch.arange(rows, device=sizes.device)
        for name, heat in (("greedy", 0.0), ("sampled", 1.0)):
            how = sampling(sizes, rows, heat)
            call = over(many, partial(_choose_by, how, positions))
            yield KernelCase(f"choose_tokens {name}, {rows} rows", call, Work(nbytes, 0.0), copies)
        filtered = _filtered(sizes, rows, rows)
        yield KernelCase(
            f"kept_tokens, {rows} rows", over(many, partial(_keep_by, filtered)), Work(nbytes, 0.0), copies
        )
        yield KernelCase(
            f"choose_tokens filtered, {rows} rows",
            over(many, partial(_choose_by, filtered, positions)),
            Work(nbytes, 0.0),
            copies,
        )
    positions = torch.arange(4, device=sizes.device)
    seeds, choices = (
        torch.arange(4, device=sizes.device),
        torch.zeros(4, dtype=torch.int32, device=sizes.device),
    )
    yield KernelCase(
        "gumbel_noise, 4 rows",
        lambda: gumbel_noise(seeds, positions, choices, sizes.vocab),
        Work(4.0 * 4 * sizes.vocab, 0.0),
    )


def _keep_by(how: SamplingTensors, logits: torch.Tensor) -> object:
    return kept_tokens(logits, how)


def _choose_by(how: SamplingTensors, positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return choose_tokens(logits, how, positions)
