"""Compares the logprobs of two runs, up to the first token at which their answers differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.services.target.request import EngineRequest
from outrider.services.verify.compare import NEAR_TIE
from outrider.services.verify.pair_engine import Answers, PairEngine
from outrider.shared.base.logit_rules import TokenLogprob

LEAST_TOLERANCE = 1e-3
"""Difference of two logprobs, in nats, that is allowed in every data type."""


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """The logprobs of a run with speculation, compared with those of the run without speculation.

    Attributes:
        compared: Number of pairs of logprobs, alternatives included.
        largest: Largest difference, in nats.
        request: Id of the request with the largest difference. Empty if nothing differs.
        tolerance: Largest difference that rounding explains.
    """

    compared: int
    largest: float
    request: str
    tolerance: float

    @property
    def holds(self) -> bool:
        """True if rounding explains every difference."""
        return self.largest <= self.tolerance


def logprob_tolerance(engine: PairEngine, prompts: Iterable[Sequence[int]]) -> float:
    """Return the largest difference of two logprobs that rounding explains, in nats.

    A logprob is a logit minus the logarithm of a sum of exponentials. Rounding may change both terms. Each
    change is at most the largest gap between two scores that rounding can reverse (`NEAR_TIE`).

    Args:
        engine: The loaded target and draft.
        prompts: Prompts as token ids. The tolerance is proportional to the largest logit after any prompt.
    """
    scale = max(float(engine.logits(prompt).abs().max()) for prompt in prompts)
    return max(LEAST_TOLERANCE, 2 * NEAR_TIE.get(engine.decoder.dtype, 0.0) * scale)


def compare_logprobs(
    requests: Mapping[str, EngineRequest], off: Answers, on: Answers, tolerance: float
) -> LogprobComparison:
    """Return the comparison of all logprobs of two runs.

    Alternative tokens are compared by rank, because rounding may swap two tokens of almost equal probability.

    Args:
        requests: The requests by id.
        off, on: The answers without and with speculation, respectively.
        tolerance: Largest difference that rounding explains; see `logprob_tolerance`.
    """
    compared, largest, worst = 0, 0.0, ""
    for name in requests:
        equal = common_length(off.tokens.get(name, ()), on.tokens.get(name, ()))
        pairs = zip(off.logprobs.get(name, ())[:equal], on.logprobs.get(name, ())[:equal], strict=False)
        prompt = zip(off.prompt_logprobs.get(name, ()), on.prompt_logprobs.get(name, ()), strict=False)
        for difference in _differences([*pairs, *prompt]):
            compared += 1
            if difference > largest:
                largest, worst = difference, name
    return LogprobComparison(compared, largest, worst, tolerance)


def _differences(pairs: Iterable[tuple[TokenLogprob, TokenLogprob]]) -> Iterator[float]:
    for off, on in pairs:
        ranked = zip(off.top, on.top, strict=False)
        values = [(off.logprob, on.logprob), *((a, b) for (_, a), (_, b) in ranked)]
        values += zip(off.requested, on.requested, strict=False)
        for one, other in values:
            difference = 0.0 if one == other else abs(one - other)  # equal infinities have no difference
            yield math.inf if math.isnan(difference) else difference


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two answers share."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
