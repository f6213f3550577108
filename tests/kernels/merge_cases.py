"""Checks of merge_attention, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.merge_attention import merge_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attention_over(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from ``q [rows, heads, dim]`` to ``k, v [tokens, heads, dim]`` in fp64; also the log-sum-exp."""
    scores = torch.einsum("rhd,thd->rht", q.double(), k.double())
    out = torch.einsum("rht,thd->rhd", scores.softmax(-1), v.double())
    return out.float(), scores.logsumexp(-1).float()


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with the tolerance of a dtype."""
    torch.testing.assert_close(found.cpu().float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_merge(
    device: str, part: torch.dtype, out: torch.dtype, rows: int, heads: int, dim: int, guards: Guards
) -> None:
    """Check that two merged parts equal attention over all tokens, with strided inputs and guard bands."""
    generator = torch.Generator().manual_seed(rows * heads + dim)
    q, k, v = (torch.randn(count, heads, dim, generator=generator) * 2 for count in (rows, 11, 11))
    expected, expected_lse = attention_over(q, k, v)
    parts = [attention_over(q, k[tokens], v[tokens]) for tokens in (slice(0, 4), slice(4, 11))]
    a, b = (one.to(device, part).transpose(0, 1).contiguous().transpose(0, 1) for one, _ in parts)
    # The log-sum-exp of a library is [heads, rows].
    a_lse, b_lse = (lse.t().contiguous().to(device).t() for _, lse in parts)
    with reference_version():
        found, lse = merge_attention(a, a_lse, b, b_lse)
    assert_near(found, expected, part)
    assert_near(lse, expected_lse, torch.float32)
    target = guards.empty((rows, heads, dim), out, torch.device(device), "out")
    with triton_version(guards):
        found, lse = merge_attention(a, a_lse, b, b_lse, out=target)
    assert found is target
    assert_near(found, expected, part if out is torch.float32 else out)
    assert_near(lse, expected_lse, torch.float32)


def check_unseen(device: str) -> None:
    """Check parts that saw no token, whose values are NaN, and a result written over the first part."""
    unseen, seen = -torch.inf, 0.5
    nan = float("nan")
    first = torch.tensor([nan, 2.0, nan, 2.0], device=device).view(4, 1, 1)
    second = torch.tensor([3.0, nan, nan, 4.0], device=device).view(4, 1, 1)
    first_lse = torch.tensor([unseen, seen, unseen, seen], device=device).view(4, 1)
    second_lse = torch.tensor([seen, unseen, unseen, seen], device=device).view(4, 1)
    lse = torch.tensor([seen, seen, unseen, seen + torch.log(torch.tensor(2.0)).item()]).view(4, 1)
    for version in (reference_version(), triton_version(Guards())):
        a, a_lse = first.clone(), first_lse.clone()
        with version:
            merge_attention(a, a_lse, second, second_lse, out=a, out_lse=a_lse)
            merge_attention(first[:0], first_lse[:0], second[:0], second_lse[:0])
        assert a.flatten().tolist() == [3.0, 2.0, 0.0, 3.0]
        torch.testing.assert_close(a_lse.cpu(), lse)


def check_poison(device: str) -> None:
    """Check that a NaN among the scores of either part reaches the result."""
    value, lse, poison = torch.ones(1, 1, 2), torch.zeros(1, 1), torch.full((1, 1), float("nan"))
    value, lse, poison = value.to(device), lse.to(device), poison.to(device)
    for version in (reference_version(), triton_version(Guards())):
        with version:
            for a, b in ((lse, poison), (poison, lse)):
                assert merge_attention(value, a, value, b)[0].isnan().all()
