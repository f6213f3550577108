"""Texts of 16-bit models, whose logits differ in their last bits with the number of rows in a pass: equal up to a near-tie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.bench.measure.near_tie import NEAR_TIE
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from support.target_harness import first_difference, next_scores

GREEDY = SamplingParams(temperature=0.0)


def differences(
    judge: Decoder,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    name: str,
    tolerance: float = NEAR_TIE,
) -> list[str]:
    """Compare two greedy texts up to their first difference, where both tokens must be nearly tied with the best.

    Args:
        judge: The target in fp32, so that its logits are free of the roundings that are judged.

    Returns:
        A line that tells tokens, logits and their gap, or nothing for equal texts.
    """
    assert judge.dtype == torch.float32
    at = first_difference(expected, found)
    if at is None:
        return []
    scores = next_scores(judge, [*prompt, *expected[:at]], GREEDY)
    best = scores.topk(3)
    worse = float(scores[torch.tensor([expected[at], found[at]])].min())
    gap, limit = float(best.values[0]) - worse, tolerance * float(best.values[0].abs())
    ranked = ", ".join(
        f"{token}: {logit:.4f}"
        for token, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    line = f"{name}: token {at} is {expected[at]} or {found[at]}; best logits in fp32 {ranked}; gap {gap:.4f}, allowed {limit:.4f}"
    assert gap <= limit, f"not nearly tied: {line}"
    return [line]
