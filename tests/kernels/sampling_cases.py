"""Checks of philox, choose_tokens and topk_expand, for interpreted tests (CPU) and compiled tests (GPU)."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.philox import gumbel_noise
from outrider.kernels.topk_expand import select_beam, topk_expand
from outrider.kernels.verify import SamplingTensors, choose_tokens


def noise_rows(
    rows: int, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return seeds that use all 64 bits, positions and choices."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**20, (rows,), generator=generator)
    choices = torch.randint(0, 4, (rows,), generator=generator, dtype=torch.int32)
    return seeds.to(device), positions.to(device), choices.to(device)


def check_gumbel_noise(device: str, rows: int, vocab: int, subset: int, guards: Guards) -> None:
    """Compare with the reference on the CPU.

    All devices must agree, because draft and target may use different ones.
    """
    generator = torch.Generator().manual_seed(rows)
    columns = noise_rows(rows, device, generator)
    tokens = torch.randperm(vocab, generator=generator)[:subset]
    with reference_version():
        expected = gumbel_noise(*(column.cpu() for column in columns), vocab)
    guarded = [guards.put(column) for column in columns]
    with triton_version(guards):
        everything = gumbel_noise(*guarded, vocab)
        some = gumbel_noise(*guarded, guards.put(tokens.to(device), "tokens"))
    torch.testing.assert_close(everything.cpu(), expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(some, everything[:, tokens.to(device)])


def sampling_rows(
    temperatures: list[float], device: str, generator: torch.Generator, *, filters: bool
) -> SamplingTensors:
    """Return parameters of one row per temperature, optionally with filters of all kinds and strengths."""
    rows = len(temperatures)
    seeds, _, choices = noise_rows(rows, device, generator)
    index = torch.arange(rows)
    top_k = torch.tensor([0, 1, 7, 100000, 50])[index % 5] if filters else torch.zeros(rows)
    top_p = torch.tensor([1.0, 0.9, 0.3, 0.0])[index % 4] if filters else torch.ones(rows)
    min_p = torch.tensor([0.0, 0.05, 1.0])[index % 3] if filters else torch.zeros(rows)
    return SamplingTensors(
        temperature=torch.tensor(temperatures, device=device),
        top_k=top_k.to(device, torch.int32),
        top_p=top_p.to(device),
        min_p=min_p.to(device),
        seeds=seeds,
        choices=choices,
        all_greedy=not any(temperatures),
        any_filter=filters,
    )


def check_choose_tokens(
    device: str, dtype: torch.dtype, temperatures: list[float], vocab: int, *, filters: bool, guards: Guards
) -> None:
    generator = torch.Generator().manual_seed(vocab + len(temperatures))
    rows = len(temperatures)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(device, dtype)
    logits[:, 1::7] = -torch.inf
    sampling = sampling_rows(temperatures, device, generator, filters=filters)
    positions = torch.arange(rows, device=device) * 5 + 1
    with reference_version():
        expected = choose_tokens(logits, sampling, positions)
    guarded = guards.put(logits, "logits")
    with triton_version(guards):
        actual = choose_tokens(guarded, sampling, positions)
    assert actual.tolist() == expected.tolist()
    assert all(0 <= token < vocab and token % 7 != 1 for token in actual.tolist())


def check_argmax_of_many_rows(device: str, dtype: torch.dtype, rows: int, vocab: int, guards: Guards) -> None:
    """Check that ties within and across blocks go to the lowest id, and that poisoned rows give -1.

    A poisoned row contains a NaN or +inf, or nothing above -inf. It must not affect other rows.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).round()  # whole numbers: ties everywhere
    logits[1, vocab - 1], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4], logits[5] = -torch.inf, 1.0
    logits[4, vocab - 2 :] = -7.0
    logits[6] = -logits[6].abs() - 1.0
    logits = logits.to(device, dtype)
    sampling = sampling_rows([0.0] * rows, device, generator, filters=False)
    positions = torch.arange(rows, device=device)
    with reference_version():
        expected = choose_tokens(logits, sampling, positions).tolist()
    assert [expected[row] for row in (1, 2, 3, 4, 5)] == [-1, -1, -1, vocab - 2, 0]
    guarded = guards.put(logits, "logits")
    with triton_version(guards):
        assert choose_tokens(guarded, sampling, positions).tolist() == expected


def check_poisoned_rows(
    device: str, vocab: int, *, temperature: float, filters: bool, guards: Guards
) -> None:
    """Check that a NaN or +inf anywhere, or nothing above -inf, gives -1 without affecting other rows."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, vocab, generator=generator)
    clean = logits.clone().to(device)
    logits[1, vocab - 1] = torch.nan
    logits[2, 0] = torch.inf
    logits[4] = -torch.inf
    logits = logits.to(device)
    sampling = sampling_rows([temperature] * 6, device, generator, filters=filters)
    positions = torch.arange(6, device=device)
    with reference_version():
        unharmed = choose_tokens(clean, sampling, positions)
        reference = choose_tokens(logits, sampling, positions)
    with triton_version(guards):
        actual = choose_tokens(guards.put(logits, "logits"), sampling, positions)
    wanted = [-1 if row in (1, 2, 4) else token for row, token in enumerate(unharmed.tolist())]
    assert actual.tolist() == reference.tolist() == wanted


def check_topk_expand(
    device: str,
    dtype: torch.dtype,
    rows: int,
    vocab: int,
    topk: int,
    *,
    coupled: bool,
    mapped: bool,
    guards: Guards,
) -> None:
    generator = torch.Generator().manual_seed(rows * vocab + topk)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(device, dtype)
    logits[:, ::5] = -torch.inf
    logits[0, : vocab // 2] = 2.5  # ties
    parent_scores = -torch.rand(rows, generator=generator).to(device)
    d2t = (torch.arange(vocab, device=device) * 2).to(torch.int64) if mapped else None
    noise = {}
    if coupled:
        temperature = torch.tensor([0.0, 1.0, 0.6, 1.7])[torch.arange(rows) % 4].to(device)
        seeds, positions, choices = noise_rows(rows, device, generator)
        noise = {"temperature": temperature, "seeds": seeds, "positions": positions, "choices": choices}
    with reference_version():
        expected = topk_expand(logits, parent_scores, topk, d2t=d2t, **noise)
    with triton_version(guards):
        actual = topk_expand(guards.put(logits, "logits"), guards.put(parent_scores), topk, d2t=d2t, **noise)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    assert bool((actual.scores <= parent_scores[:, None]).all())


def check_select_beam(device: str, bs: int, candidates: int, topk: int, guards: Guards) -> None:
    generator = torch.Generator().manual_seed(bs * candidates)
    scores = -torch.randint(0, 6, (bs, candidates), generator=generator).float()  # many ties
    scores[0, candidates // 2 :] = -torch.inf
    scores = scores.to(device)
    with reference_version():
        expected = select_beam(scores, topk)
    with triton_version(guards):
        actual = select_beam(guards.put(scores, "scores"), topk)
    assert actual.tolist() == expected.tolist()
    for row, chosen in zip(scores.tolist(), actual.tolist(), strict=True):
        assert chosen == sorted(range(candidates), key=lambda c: (-row[c], c))[:topk]
