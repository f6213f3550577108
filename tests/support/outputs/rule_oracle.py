"""The meaning of penalties, biases and forbidden tokens, written as simply as possible, for comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from outrider.shared.base.logit_rules import LogitRules


def ruled(
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    rules: LogitRules,
    stops: Sequence[int],
) -> torch.Tensor:
    """Return the logits ``[V]`` of the next token after the rules.

    Args:
        logits: ``[V]``; not changed.
        prompt: Tokens of the prompt.
        output: Tokens that were generated so far.
        rules: The rules.
        stops: Tokens that end the text.
    """
    scores = logits.float().tolist()
    for token, bias in rules.logit_bias:
        scores[token] += bias
    for token in {*prompt, *output}:
        factor = rules.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= rules.frequency_penalty * count + rules.presence_penalty
    forbidden = set(stops) if len(output) < rules.min_tokens else set()
    if rules.allowed_token_ids is not None:
        forbidden |= set(range(len(scores))) - set(rules.allowed_token_ids)
    for word in rules.bad_words:
        start = list(word[:-1])
        if not start or list(output[-len(start) :]) == start:
            forbidden.add(word[-1])
    for token in forbidden:
        scores[token] = -torch.inf
    return torch.tensor(scores)
