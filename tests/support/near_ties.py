"""Compares texts of 16-bit models, which must be equal up to a near-tie.

In 16 bits, the last bits of logits depend on the number of rows in a pass.
"""

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
    """Compare two greedy texts, whose first difference must be between tokens nearly tied with the best.

    Args:
        judge: The target in fp32, whose logits do not have the rounding errors in question.
        prompt: Token ids of the prompt.
        expected, found: Token ids of the two answers.
        name: Name of the comparison, for messages.
        tolerance: Largest gap of a near-tie, relative to the best logit.

    Returns:
        A line with the tokens, their logits and the gap; no line if the texts are equal.
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
    line = (
        f"{name}: token {at} is {expected[at]} or {found[at]}; best logits in fp32 {ranked}; "
        f"gap {gap:.4f}, allowed {limit:.4f}"
    )
    assert gap <= limit, f"not nearly tied: {line}"
    return [line]
