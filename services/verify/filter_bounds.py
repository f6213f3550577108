"""Finds the tokens that filters may keep, and those that they keep with any rounding of the scores.

Passes of different sizes round the scores differently. A token at the boundary of a filter may therefore be
kept with one pass and dropped with the other.
"""

from __future__ import annotations

import math

import torch

from outrider.shared.base.generation import SamplingParams


def filter_bounds(
    scores: torch.Tensor, sampling: SamplingParams, slack: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens top-k, top-p and min-p may keep, and which they keep in any case.

    Args:
        scores: ``[vocab]``, logits divided by the temperature.
        sampling: The filters.
        slack: Largest change of the difference between two scores that rounding can cause.

    Returns:
        Two tensors ``[vocab] bool``. The second one marks a part of the tokens of the first one.
    """
    exact = scores.double()
    ranked = exact.sort(descending=True).values
    best, vocab = ranked[0], ranked.shape[0]
    may = torch.ones_like(exact, dtype=torch.bool)
    must = may.clone()
    weights = (ranked - best).exp()
    if 0 < sampling.top_k < vocab:
        may &= exact >= ranked[sampling.top_k - 1] - slack
        must &= exact > ranked[sampling.top_k] + slack
        weights[sampling.top_k :] = 0.0
    if sampling.top_p < 1:
        # Rounding may change the order of close scores, and all weights by factors of up to exp(slack).
        mass = torch.cat([torch.zeros(1, dtype=torch.double), weights.cumsum(0) / weights.sum()])
        least = _odds(mass[_number_above(ranked, exact + slack)]) * math.exp(-slack)
        most = _odds(mass[_number_above(ranked, exact - slack) - 1]) * math.exp(slack)
        wanted = _odds(torch.tensor(sampling.top_p, dtype=torch.double))
        may &= least < wanted
        must &= most < wanted
    if sampling.min_p > 0:
        floor = best + math.log(sampling.min_p)
        may &= exact >= floor - slack
        must &= exact >= floor + slack
    # The filters keep the best token in any case.
    may |= exact >= best - slack
    if vocab == 1 or best - ranked[1] > slack:
        must |= exact == best
    return may, must & may


def _odds(share: torch.Tensor) -> torch.Tensor:
    return share / (1 - share).clamp(min=1e-12)


def _number_above(ranked: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return how many of the ranked scores are above each bound."""
    return torch.searchsorted(-ranked, -bounds)
