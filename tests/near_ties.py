"""Texts of 16-bit models, whose logits differ in their last bits with the number of rows in a pass: equal up to a near-tie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from target_harness import first_difference, next_scores

from outrider.services.target.request import SamplingParams
from outrider.shared.nn.decoder import Decoder

NEAR_TIE = 2.0**-5
"""How much of the best logit the two best may be apart where the text differs: 8 roundings of bf16, whose numbers have 8 bits. They
add up over the layers, and a logit is rounded itself."""
GREEDY = SamplingParams(temperature=0.0)


def differences(
    decoder: Decoder, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int], name: str, tolerance: float = NEAR_TIE
) -> list[str]:
    """Compare two greedy texts up to their first difference, where the two tokens must be the two best of the target, and nearly tied.

    Returns:
        A line that tells tokens, logits and their gap, or nothing for equal texts.
    """
    at = first_difference(expected, found)
    if at is None:
        return []
    scores = next_scores(decoder, [*prompt, *expected[:at]], GREEDY)
    best = scores.topk(3)
    gap, limit = float(best.values[0] - best.values[1]), tolerance * float(best.values[0].abs())
    ranked = ", ".join(f"{token}: {logit:.4f}" for token, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    line = f"{name}: token {at} is {expected[at]} or {found[at]}; best logits {ranked}; gap {gap:.4f}, allowed {limit:.4f}"
    chosen = scores[torch.tensor([expected[at], found[at]])]
    assert gap <= limit, f"the best logits are not nearly tied: {line}"
    assert float(best.values[0] - chosen.min()) <= limit, f"a token that is not among the best was chosen: {line}"
    return [line]
