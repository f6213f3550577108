"""Compares texts of 16-bit models. The texts must be equal, except after a near-tie of two logits.

In 16 bits, the last bits of logits depend on the number of rows in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.bench.measure.near_tie import NEAR_TIE
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from support.engine.target_harness import first_difference, next_scores

GREEDY = SamplingParams(temperature=0.0)


def differences(
    judge: Decoder,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    name: str,
    tolerance: float = NEAR_TIE,
) -> list[str]:
    """Compare two greedy texts. Where they first differ, both tokens must be nearly tied with the best token.

    Args:
        judge: The target in fp32. Its logits do not have the rounding errors of the 16-bit models.
        prompt: Token ids of the prompt.
        expected, found: Token ids of the two answers.
        name: Name of the comparison, for messages.
        tolerance: Largest gap of a near-tie, relative to the best logit.

    Returns:
        A line with the tokens, their logits and the gap. No line if the texts are equal.
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
