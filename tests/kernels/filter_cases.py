"""Checks of filtered_choice, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.filtered_choice import kept_tokens
from outrider.kernels.filtered_choice.reference import scaled, token_keys
from outrider.kernels.verify import SamplingTensors, choose_tokens

ROUNDING = 1e-6
"""Tolerance of a prefix's probability, which is a long sum in fp32. If it is within this distance from p, the
token at the end of the prefix may be kept or dropped."""
FILTERS = [
    (0, 0.9, 0.0), (50, 1.0, 0.0), (50, 0.9, 0.0), (1, 1.0, 0.0), (7, 0.5, 0.05), (0, 1.0, 0.1),
    (0, 0.999, 0.0), (100_000_000, 0.8, 0.0),
    (0, 0.0, 0.0), (3000, 0.3, 0.0), (0, 1.0, 0.0), (0, 1e-9, 1.0),
]  # fmt: skip


def filters_of(rows: int, device: str, temperature: float = 1.0) -> SamplingTensors:
    """Return sampling parameters that use every filter of `FILTERS` in turn; the last row is greedy."""
    picked = [FILTERS[row % len(FILTERS)] for row in range(rows)]
    heat = torch.full((rows,), temperature)
    heat[-1] = 0.0 if rows > len(FILTERS) else temperature
    return SamplingTensors(
        temperature=heat.to(device),
        top_k=torch.tensor([top_k for top_k, _, _ in picked], dtype=torch.int32, device=device),
        top_p=torch.tensor([top_p for _, top_p, _ in picked], dtype=torch.float32, device=device),
        min_p=torch.tensor([min_p for _, _, min_p in picked], dtype=torch.float32, device=device),
        seeds=torch.arange(rows, device=device) * 0x9E3779B97F4A7C1 - (1 << 60),
        choices=torch.zeros(rows, dtype=torch.int32, device=device),
        all_greedy=False,
        any_filter=True,
    )


def logits_of(kind: str, rows: int, vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return synthetic rows of a kind: "peaked", "flat", "ties" or "masked"; normal ones for other names."""
    generator = torch.Generator().manual_seed(vocab + rows)
    logits = torch.randn(rows, vocab, generator=generator) * {"peaked": 6.0, "flat": 0.01}.get(kind, 2.0)
    if kind == "ties":
        logits = (logits * 2).round() / 2
        logits[:, ::3] = 0.0
        logits[:, 1::6] = -0.0
    if kind == "masked":
        logits[:, 5:] = -torch.inf
    return logits.to(device, dtype)


def check_kept_tokens(
    kind: str, rows: int, vocab: int, dtype: torch.dtype, device: str, guards: Guards
) -> None:
    """Check the kept tokens against the filters' definition, tie by tie.

    They may differ only where a sum of probabilities equals p up to rounding. The expected tokens are
    computed in fp64, because the reference's fp32 sums over 128,256 tokens are off by up to 4e-6 on a GPU.
    """
    logits, sampling = logits_of(kind, rows, vocab, dtype, device), filters_of(rows, device, 0.7)
    finite = logits > -torch.inf
    with triton_version(guards):
        found = kept_tokens(guards.put(logits, "logits"), sampling)
    actual = found.mask(token_keys(logits, sampling.temperature)) & finite
    scores = scaled(logits, sampling.temperature).double()
    for row in range(rows):
        if sampling.temperature[row] == 0:
            assert torch.equal(actual[row], finite[row]), "a greedy row must keep all tokens"
            continue
        top_k, p = int(sampling.top_k[row]), float(sampling.top_p[row])
        order = scores[row].sort(descending=True, stable=True)
        weights = (order.values - order.values[0]).exp()
        weights[top_k or vocab :] = 0.0
        before = (weights.cumsum(0) - weights) / weights.sum()
        kept = (
            ((before < p) | (p >= 1))
            & (torch.arange(vocab, device=device) < (top_k or vocab))
            & finite[row][order.indices]
        )
        kept[0] = True
        wrong = actual[row][order.indices] != kept
        if bool(wrong.any()):
            assert p < 1, f"row {row}: top-k {top_k} keeps {int(actual[row].sum())} tokens"
            off = float((before[wrong] - p).abs().max())
            assert off < ROUNDING, (
                f"row {row} keeps {int(actual[row].sum())} tokens, not {int(kept.sum())}; {off:.1e} from p"
            )


def check_reference(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Check that the reference and the Triton version keep the same tokens of rows with short sums."""
    logits, sampling = logits_of(kind, rows, vocab, dtype, "cpu"), filters_of(rows, "cpu", 0.7)
    keys, finite = token_keys(logits, sampling.temperature), logits > -torch.inf
    with reference_version():
        expected = kept_tokens(logits, sampling).mask(keys) & finite
    with triton_version(Guards()):
        actual = kept_tokens(logits, sampling).mask(keys) & finite
    assert torch.equal(actual, expected)


def check_choices(vocab: int, draws: int, dtype: torch.dtype, device: str, guards: Guards) -> None:
    """Check that search and sorting choose the same tokens, seed by seed."""
    for top_k, top_p, min_p in FILTERS[:6]:
        logits = logits_of("ties", 1, vocab, dtype, device).expand(draws, vocab).contiguous()
        sampling = filters_of(draws, device)
        sampling.temperature.fill_(0.8)
        sampling.top_k.fill_(top_k)
        sampling.top_p.fill_(top_p)
        sampling.min_p.fill_(min_p)
        positions = torch.arange(draws, device=device) * 3
        with reference_version():
            expected = choose_tokens(logits, sampling, positions)
        with triton_version(guards):
            actual = choose_tokens(logits, sampling, positions)
        assert actual.tolist() == expected.tolist(), (top_k, top_p, min_p)
        assert len(set(expected.tolist())) > 1 or top_k == 1


def check_mixed_choices(rows: int, vocab: int, dtype: torch.dtype, device: str, guards: Guards) -> None:
    """Check that greedy, unfiltered and filtered rows in any order choose as they do alone."""
    logits, sampling = logits_of("ties", rows, vocab, dtype, device), filters_of(rows, device, 0.8)
    logits[rows // 3] = torch.nan
    generator = torch.Generator().manual_seed(rows)
    heat = torch.tensor([0.0, 0.7, 1.3])[torch.randint(0, 3, (rows,), generator=generator)]
    sampling = replace(sampling, temperature=heat.to(device))
    neutral = (torch.rand(rows, generator=generator) < 0.5).to(device)
    for column, value in ((sampling.top_k, 0), (sampling.top_p, 1.0), (sampling.min_p, 0.0)):
        column[neutral] = value
    positions = torch.arange(rows, device=device) * 3
    with reference_version():
        expected = choose_tokens(logits, sampling, positions)
    with triton_version(guards):
        actual = choose_tokens(guards.put(logits, "logits"), sampling, positions)
    assert actual.tolist() == expected.tolist()
    assert int(expected[rows // 3]) == -1


def check_ties(vocab: int, dtype: torch.dtype, device: str, guards: Guards) -> None:
    """Check that tokens with equal logits are kept and chosen in the order of their ids.

    Four tokens share the best logit. All others share a logit that makes them improbable. The last row is
    greedy.
    """
    best = sorted({0, 3, vocab // 2, vocab - 1})
    others = [token for token in range(vocab) if token not in best]
    logits = torch.full((1, vocab), -30.0)
    logits[0, best] = 2.0
    everything = list(range(vocab))
    cases: list[tuple[int, float, float, list[int]]] = [
        (1, 1.0, 0.0, best[:1]),
        (3, 1.0, 0.0, best[:3]),
        (0, 0.3, 0.0, best[:2]),
        (0, 0.6, 0.0, best[:3]),
        (3, 0.5, 0.0, best[:2]),
        (len(best) + 2, 1.0, 0.0, sorted([*best, *others[:2]])),
        (0, 1.0, 1.0, everything),  # Min-p is not part of `kept_tokens`.
        (0, 1.0, 0.0, everything),
    ]
    sampling = filters_of(len(cases), device)
    columns = zip(*(case[:3] for case in cases), strict=True)
    for column, values in zip((sampling.top_k, sampling.top_p, sampling.min_p), columns, strict=True):
        column.copy_(torch.tensor(values))
    sampling.temperature.fill_(1.0)
    sampling.temperature[-1] = 0.0
    rows = logits.to(device, dtype).expand(len(cases), vocab).contiguous()
    chosen = []
    for version in (reference_version, lambda: triton_version(guards)):
        with version():
            kept = kept_tokens(rows, sampling).mask(token_keys(rows, sampling.temperature))
            chosen.append(choose_tokens(rows, sampling, torch.arange(len(cases), device=device)).tolist())
        for row, (top_k, top_p, _, expected) in enumerate(cases):
            assert kept[row].nonzero().flatten().tolist() == expected, (top_k, top_p)
    assert chosen[0] == chosen[1]
    assert all(token in best and token in case[3] for token, case in zip(chosen[0], cases, strict=True))
    assert chosen[0][-1] == best[0], "a greedy row chooses the lowest id"
