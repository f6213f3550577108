"""Compares the answers of two runs.

Rounding may swap two tokens whose scores are almost equal, and may move a token across the boundary of a
filter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.services.target.request import EngineRequest
from outrider.services.verify.filter_bounds import filter_bounds
from outrider.services.verify.pair_engine import Answers, PairEngine, scores_of
from outrider.shared.base.logit_rules import LogitRules

NEAR_TIE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Data type → largest gap between two scores that rounding may reverse, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which two answers differ.

    Attributes:
        request: Id of the request. The id names the sampling option and the prompt.
        token: Index of the differing token in the answers.
        off, on: The tokens without and with speculation, respectively. None if that answer ended earlier.
        gap: Best score at this position, minus the score of the worse of the two tokens. Only tokens that the
            filters keep in any case count as best. Infinite if the filters cannot keep one of the two tokens.
        allowed: Largest gap that rounding explains.
    """

    request: str
    token: int
    off: int | None
    on: int | None
    gap: float
    allowed: float

    @property
    def is_near_tie(self) -> bool:
        """True if rounding explains the difference."""
        return self.gap <= self.allowed


def ruled(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], rules: LogitRules
) -> torch.Tensor:
    """Return logits ``[vocab]`` after biases and penalties are applied. Forbidden tokens keep their logits.

    Args:
        logits: ``[vocab] float32``.
        prompt, output: Tokens of the prompt, and tokens generated so far.
        rules: The biases, penalties and other rules of the request.
    """
    out = logits.clone()
    for token, bias in rules.logit_bias:
        out[token] += bias
    for token in {*prompt, *output}:
        out[token] *= 1 / rules.repetition_penalty if out[token] > 0 else rules.repetition_penalty
    for token, count in Counter(output).items():
        out[token] -= rules.frequency_penalty * count + rules.presence_penalty
    return out


def differences(
    engine: PairEngine, requests: Mapping[str, EngineRequest], off: Answers, on: Answers
) -> list[Difference]:
    """Return the first difference of each answer, near-ties included."""
    found = (
        _difference(engine, request, off.tokens.get(name, []), on.tokens.get(name, []))
        for name, request in requests.items()
    )
    return [one for one in found if one is not None]


def _difference(
    engine: PairEngine, request: EngineRequest, off: list[int], on: list[int]
) -> Difference | None:
    if off == on:
        return None
    at = next((i for i, (a, b) in enumerate(zip(off, on, strict=False)) if a != b), min(len(off), len(on)))
    first, second = (answer[at] if at < len(answer) else None for answer in (off, on))
    if first is None or second is None:
        return Difference(request.request_id, at, first, second, float("inf"), 0.0)
    context, sampling = [*request.prompt_ids, *off[:at]], request.sampling
    raw = engine.logits(context)
    logits = ruled(raw, request.prompt_ids, off[:at], sampling.rules)
    scale = float(raw.abs().max()) / (sampling.temperature or 1.0)
    allowed = NEAR_TIE.get(engine.decoder.dtype, 0.0) * scale
    scores = scores_of(logits, len(context), sampling)
    worse = float(torch.minimum(scores[first], scores[second]))
    kept = torch.ones_like(scores, dtype=torch.bool)
    if sampling.temperature > 0:
        # Rounding may move a token at the boundary of a filter to the other side.
        may, kept = filter_bounds(logits / sampling.temperature, sampling, allowed)
        if not (may[first] and may[second]):
            worse = -math.inf
    if not sampling.rules.neutral or request.grammar is not None:
        # Rules and grammars may forbid the best token. Then only the two tokens can be compared.
        kept &= torch.zeros_like(kept).index_fill(0, torch.tensor([first, second]), True)
    best = float(scores[kept].max()) if bool(kept.any()) else worse
    return Difference(request.request_id, at, first, second, max(0.0, best - worse), allowed)
