"""Tests the output law: drafted tokens follow the target's probabilities over many seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.services.target.request import EngineRequest, SpeculationParams
from outrider.services.verify.pair_engine import PairEngine, filtered
from outrider.shared.base.generation import SamplingParams
from outrider.shared.spec.tree import DraftShape

TOP_K = 8
"""Only the eight most likely tokens are sampled, so that there are few outcomes and few first tokens."""
LEAST_EXPECTED = 5.0
"""Outcomes with a smaller expected count are counted together, as usual for a chi-square test."""
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0)
ENOUGH_ENTROPY = 1.2
"""Least entropy, in nats, at which samples spread over enough outcomes. The entropy of eight outcomes is at
most 2.1 nats."""
ALARM = 1e-4
"""Probability below which the counts contradict the law."""


@dataclass(frozen=True, slots=True)
class LawTest:
    """Result of a chi-square test of the distribution of sampled tokens.

    Attributes:
        samples: Number of sampled answers.
        temperature: Temperature at which the answers were sampled.
        outcomes: Number of outcomes that were counted separately.
        p_value: Probability that samples from the correct distribution deviate from it at least this much.
    """

    samples: int
    temperature: float
    outcomes: int
    p_value: float

    @property
    def holds(self) -> bool:
        """True unless the counts contradict the law."""
        return self.p_value >= ALARM


def law_tokens(shape: DraftShape) -> int:
    """Return the length of a sampled answer. A shorter answer would not leave room for the whole tree."""
    return 2 + shape.depth


def check_law(
    engine: PairEngine, prompt: Sequence[int], samples: int, speculation: SpeculationParams
) -> LawTest:
    """Sample the first two tokens after a prompt, and compare the second with the target's probabilities.

    Only the second token depends on speculation. Its expected counts are computed from the target's
    probabilities after each first token that was sampled.

    Args:
        engine: The loaded target and draft.
        prompt: The prompt as token ids.
        samples: Number of sampled answers, each with its own seed.
        speculation: The shape of the draft trees.

    Raises:
        OutriderError: A request failed.
    """
    sampling = _spread(engine, prompt)
    requests = [
        EngineRequest(
            str(seed),
            tuple(prompt),
            law_tokens(speculation.shape),
            replace(sampling, seed=seed),
            speculation,
            ignore_eos=True,
        )
        for seed in range(1, samples + 1)
    ]
    answers = engine.answer(requests, speculate=True).tokens.values()
    pairs = Counter((tokens[0], tokens[1]) for tokens in answers)
    expected, counted = [], []
    for first, number in Counter(tokens[0] for tokens in answers).items():
        law = torch.softmax(filtered(engine.logits([*prompt, first]), sampling)[0].double(), -1)
        for second in law.nonzero().flatten().tolist():
            expected.append(number * float(law[second]))
            counted.append(float(pairs.pop((first, second), 0)))
        # The outcomes that are left in `pairs` have probability 0 under the law.
    p_value, outcomes = (0.0, len(expected)) if pairs.total() else chi_square(expected, counted)
    return LawTest(samples, sampling.temperature, outcomes, p_value)


def _spread(engine: PairEngine, prompt: Sequence[int]) -> SamplingParams:
    """Return sampling parameters for which the first two tokens have several likely outcomes.

    A trained model is often almost sure of the next token, and a single outcome would test nothing.
    """
    first = engine.logits(prompt)
    second = engine.logits([*prompt, int(first.argmax())])
    sampling = SamplingParams(top_k=TOP_K)
    for temperature in TEMPERATURES:
        sampling = SamplingParams(temperature=temperature, top_k=TOP_K)
        laws = [torch.softmax(filtered(logits, sampling)[0].double(), -1) for logits in (first, second)]
        if min(float(torch.special.entr(law).sum()) for law in laws) >= ENOUGH_ENTROPY:
            break
    return sampling


def chi_square(expected: Sequence[float], counted: Sequence[float]) -> tuple[float, int]:
    """Run a chi-square test, and return (p-value, number of cells).

    Outcomes with expected counts below `LEAST_EXPECTED` are merged into one cell. With fewer than two cells,
    the p-value is 1.
    """
    often = [pair for pair in zip(expected, counted, strict=True) if pair[0] >= LEAST_EXPECTED]
    rare = [pair for pair in zip(expected, counted, strict=True) if pair[0] < LEAST_EXPECTED]
    cells = [*often, (math.fsum(e for e, _ in rare), math.fsum(c for _, c in rare))]
    cells = [cell for cell in cells if cell[0] >= LEAST_EXPECTED]
    if len(cells) < 2:
        return 1.0, len(cells)
    statistic = math.fsum((count - mean) ** 2 / mean for mean, count in cells)
    half = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))
    return p_value, len(cells)
