"""`outrider verify` excuses a token that rounding moves across the boundary of a filter, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.verify.filters import filter_logits
from outrider.services.target.request import EngineRequest, SpeculationParams
from outrider.services.verify.compare import NEAR_TIE, Difference, differences
from outrider.services.verify.filter_bounds import filter_bounds
from outrider.services.verify.pair_engine import Answers, scores_of
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.spec.tree import DraftShape

FILTERS = [
    SamplingParams(),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=999),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=8, top_p=0.8, min_p=0.05),
]


def kept(scores: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return which tokens the filters keep, ``[vocab] bool``."""
    columns = (
        torch.tensor([sampling.top_k], dtype=torch.int32),
        torch.tensor([sampling.top_p]),
        torch.tensor([sampling.min_p]),
    )
    return filter_logits(scores[None].float(), *columns)[0] > -torch.inf


@given(
    st.integers(0, 1 << 30),
    st.sampled_from(FILTERS),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([0.02, 0.5, 3.0]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_bounds_hold_for_every_rounding(
    seed: int, sampling: SamplingParams, slack: float, width: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(40, generator=generator) * width
    may, must = filter_bounds(scores, sampling, slack + 1e-5)
    assert bool((may | ~must).all())
    for _ in range(5):
        rounded = scores + (torch.rand(40, generator=generator) - 0.5) * slack
        found = kept(rounded, sampling)
        assert bool((may | ~found).all()), "a kept token must be possible"
        assert bool((found | ~must).all()), "a certain token must be kept"


def test_without_rounding_the_bounds_are_the_filter() -> None:
    scores = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    for sampling in FILTERS:
        may, must = filter_bounds(scores, sampling, 0.0)
        assert may.tolist() == must.tolist() == kept(scores, sampling).tolist(), sampling


def judged(
    logits: torch.Tensor, sampling: SamplingParams, off: int, on: int, dtype: torch.dtype
) -> Difference:
    """Return the judgement on two answers of one token, for a target that computes these logits."""
    request = EngineRequest(
        "r", (1, 2), 4, sampling, SpeculationParams(SpeculationMode.ON, DraftShape(3, 2, 7))
    )
    engine: Any = SimpleNamespace(logits=lambda tokens: logits, decoder=SimpleNamespace(dtype=dtype))
    answers = [Answers(tokens={"r": [token]}) for token in (off, on)]
    [found] = differences(engine, {"r": request}, *answers)
    return found


def noise_of(sampling: SamplingParams, vocab: int) -> torch.Tensor:
    return scores_of(torch.zeros(vocab), 2, sampling)


def winner_and_next(sampling: SamplingParams, vocab: int) -> tuple[int, int]:
    """Return the two tokens with the largest noise."""
    first, second = noise_of(sampling, vocab).topk(2).indices.tolist()
    return first, second


@pytest.mark.parametrize("distance", [0.001, 5.0])
def test_a_token_at_the_boundary_of_top_k_may_be_in_or_out(distance: float) -> None:
    """Token a would win, but top-k keeps token b instead, whose logit is larger by `distance`."""
    sampling = SamplingParams(top_k=2, seed=5)
    vocab = 32
    a, b = winner_and_next(sampling, vocab)
    top = next(token for token in range(vocab) if token not in (a, b))
    logits = torch.full((vocab,), -50.0)
    # The token `top` is kept, and its noise is so small that it never wins.
    gap = float(noise_of(sampling, vocab)[b] - noise_of(sampling, vocab)[top])
    assert gap > 0.2
    logits[top], logits[b], logits[a] = 0.1, 0.0, -distance
    found = judged(logits, sampling, b, a, torch.float32)
    assert found.allowed == pytest.approx(NEAR_TIE[torch.float32] * 50.0)
    assert not found.is_near_tie, "fp32 rounds by less than this distance"
    found = judged(logits, sampling, b, a, torch.bfloat16)
    assert found.is_near_tie == (distance < found.allowed)


def test_a_token_that_no_rounding_explains_is_wrong() -> None:
    sampling = SamplingParams(top_p=0.9, seed=5)
    logits = torch.zeros(32)
    logits[3] = 6.0
    assert judged(logits, sampling, 3, 7, torch.bfloat16).gap == float("inf")
    flat = torch.linspace(0.0, 0.01, 32) + 1.0
    worst = int(noise_of(sampling, 32).argmin())
    best = int(noise_of(sampling, 32).argmax())
    assert not judged(flat, sampling, best, worst, torch.bfloat16).is_near_tie
