"""Checks of expand_level, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version
from sampling_cases import noise_rows

from outrider.kernels.topk_expand import Beam, Candidates, Noise, expand_level, num_candidates


def empty_candidates(bs: int, depth: int, topk: int, device: str) -> Candidates:
    shape = (bs, num_candidates(depth, topk))
    scores, logprobs = (torch.full(shape, 9.0, device=device) for _ in range(2))
    tokens, parents = (torch.full(shape, 77, dtype=torch.int32, device=device) for _ in range(2))
    return Candidates(scores, tokens, parents, logprobs)


def check_expand_level(
    device: str,
    dtype: torch.dtype,
    bs: int,
    vocab: int,
    topk: int,
    depth: int,
    *,
    coupled: bool,
    mapped: bool,
    guards: Guards,
) -> None:
    """Check all levels of a tree; each version continues from its own beams."""
    generator = torch.Generator().manual_seed(bs * vocab + topk * 7 + depth)
    d2t = (torch.arange(vocab, device=device) * 2).to(torch.int64) if mapped else None
    noise = None
    if coupled:
        seeds, positions, choices = noise_rows(bs, device, generator)
        temperature = torch.tensor([0.6, 0.0, 1.7])[torch.arange(bs) % 3].to(device)
        noise = Noise(temperature, seeds, positions.to(torch.int32), choices)
    words = -(-max(1, depth - 1) * topk // 32)
    expected, actual = empty_candidates(bs, depth, topk, device), empty_candidates(bs, depth, topk, device)
    actual = Candidates(*(guards.put(table) for table in actual))
    wanted: Beam | None = None
    beam: Beam | None = None
    for level in range(depth):
        rows = bs if level == 0 else bs * topk
        logits = (torch.randn(rows, vocab, generator=generator) * 3).to(device, dtype)
        if not coupled:
            logits = logits.round()  # ties within rows and between them
        arguments = {"words": words, "last": level == depth - 1, "d2t": d2t, "noise": noise}
        with reference_version():
            wanted = expand_level(logits, wanted, level, topk, expected, **arguments)
        with triton_version(guards):
            beam = expand_level(guards.put(logits, "logits"), beam, level, topk, actual, **arguments)
        columns = expected.level(level, topk)
        for have, want in ((actual.tokens, expected.tokens), (actual.parents, expected.parents)):
            assert have[:, columns].tolist() == want[:, columns].tolist()
        for have, want in ((actual.scores, expected.scores), (actual.logprobs, expected.logprobs)):
            torch.testing.assert_close(have[:, columns], want[:, columns], atol=1e-5, rtol=1e-5)
        assert (beam is None) == (wanted is None) == (level == depth - 1)
        if beam is not None and wanted is not None:
            for name in ("tokens", "parents", "candidates", "ancestors"):
                have, want = getattr(beam, name), getattr(wanted, name)
                assert have.dtype == want.dtype, name
                assert have.tolist() == want.tolist(), name
            torch.testing.assert_close(beam.scores, wanted.scores, atol=1e-5, rtol=1e-5)
            beam = beam._replace(scores=wanted.scores)  # different rounding must not change the order of ties
    assert not bool((expected.tokens == 77).any() & mapped)
