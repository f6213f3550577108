"""Estimates how many draft tokens of a round are accepted, by drafter, kind of sampling and request.

p_d is the probability that the draft token at depth d is accepted if its parent was accepted. The expected
number of tokens of a round of depth D is the following sum. Its first term is the token that the target adds.

    1 + p_1 + p_1 p_2 + ... + p_1 p_2 ... p_D

`DrafterAcceptance` estimates p_d from all rounds with one drafter, separately for each kind of sampling, and
for trees and chains. The estimates are kept when requests end and when the draft service restarts.

Each request also has a *level*. The level states how much better or worse the request's drafts are than those
of other requests. It shifts the log-odds of every p_d. A new request starts at level 0, and its own rounds
adjust the level.
"""

from __future__ import annotations

import math
from enum import Enum

from outrider.shared.base.generation import SamplingParams

MAX_DEPTH = 16
"""Number of depths that have separate estimates. Every greater depth uses the probability of the last one."""
DECAY = 0.995
"""Factor by which each new round of a request reduces the weight of a drafter's older rounds."""
PRIOR_STRENGTH = 3.0
"""Weight of the prior of a drafter's p_d, as a number of rounds."""
PRIOR_ACCEPTANCE = 0.6
"""Estimate of p_1 before any round has been measured."""
OTHERS_STRENGTH = 12.0
"""Largest weight of the prior that comes from other rounds, as a number of rounds. The other rounds have
another kind of sampling or the other type (tree or chain)."""
FADING = 0.99
"""Factor by which each decision reduces the weight of outdated trials.

Trials of a depth are outdated if rounds with the same kind of sampling ran since the last decision, but none
reached this depth. Without the factor, a few old rounds would determine the estimates of unused depths
forever."""
SURE_TRIALS = 60
"""Number of trials at a depth greater than 1 after which its estimate gets no bonus; see `rates`."""
ROUNDS_TO_KNOW = 10
"""Number of rounds after which the acceptance of a drafter counts as known. Older rounds count less."""
ACCEPTED_TO_KNOW = 3
"""Number of rounds with an accepted draft token that suffice even before `ROUNDS_TO_KNOW` rounds.

Older rounds count less. A few accepted tokens show that a drafter works, whereas a few rejected tokens do not
show that it fails."""
SEQUENCE_DECAY = 0.95
"""Factor by which each new round of a request reduces the weight of the request's older rounds."""
SEQUENCE_STRENGTH = 6.0
"""Weight of the drafter's acceptance in the level of a request, as a number of draft tokens."""
STEPS_PER_UNIT = 2
"""Number of levels per unit of log-odds."""
MOST_LEVEL = 10
LEAST_RATE = 0.002
"""Smallest probability for which log-odds are computed."""


class SamplingKind(Enum):
    """Kinds of sampling that accept drafts differently."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"

    @classmethod
    def of(cls, sampling: SamplingParams) -> SamplingKind:
        """Return the kind of a request."""
        if sampling.temperature == 0:
            return cls.GREEDY
        filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
        return cls.FILTERED if filtered else cls.SAMPLED


class _Counts:
    """Trials and successes at each depth, with decay."""

    __slots__ = ("fresh", "successes", "trials")

    def __init__(self) -> None:
        self.fresh = 0  # number of depths that were measured since the last decision
        self.trials = [0.0] * MAX_DEPTH
        self.successes = [0.0] * MAX_DEPTH

    def observe(self, accepted: int, offered_depth: int) -> None:
        # Depths below the first rejection do not count as trials, because their parents were not accepted.
        measured = min(accepted + 1, offered_depth, MAX_DEPTH)
        self.fresh = max(self.fresh, measured)
        for depth in range(measured):
            self.trials[depth] = self.trials[depth] * DECAY + 1.0
            self.successes[depth] = self.successes[depth] * DECAY + (accepted > depth)

    def fade(self) -> None:
        for depth in range(self.fresh, MAX_DEPTH):
            self.trials[depth] *= FADING
            self.successes[depth] *= FADING


class DrafterAcceptance:
    """The acceptance of one drafter. `refresh` updates the rates and the expected tokens."""

    __slots__ = ("_counts", "_expected", "_rates")

    def __init__(self) -> None:
        self._counts: dict[tuple[SamplingKind, bool], _Counts] = {}
        self._rates: dict[tuple[SamplingKind, bool], list[float]] = {}
        self._expected: dict[tuple[SamplingKind, bool, int], list[float]] = {}

    def observe(self, kind: SamplingKind, chain: bool, accepted: int, offered_depth: int) -> None:
        """Record one request's round, in which `accepted` nodes of `offered_depth` levels were accepted."""
        counts = self._counts.get((kind, chain))
        if counts is None:
            counts = self._counts[kind, chain] = _Counts()
        counts.observe(accepted, offered_depth)

    def refresh(self) -> None:
        """Make `rates` and `expected_tokens` include all rounds so far. Called once for each decision."""
        in_use = {kind for (kind, _), counts in self._counts.items() if counts.fresh}
        for (kind, _), counts in self._counts.items():
            if kind in in_use:
                counts.fade()
                counts.fresh = 0
        self._rates.clear()
        self._expected.clear()

    @property
    def known(self) -> bool:
        """True if enough rounds have been measured to rely on the estimates."""
        trials = sum(counts.trials[0] for counts in self._counts.values())
        accepted = sum(counts.successes[0] for counts in self._counts.values())
        return trials >= ROUNDS_TO_KNOW or accepted > ACCEPTED_TO_KNOW - 0.5

    def rates(self, kind: SamplingKind, chain: bool) -> list[float]:
        """Return the `MAX_DEPTH` estimates p_1, p_2, …, i.e. the acceptance probability at each depth.

        The prior of an estimate comes from the other kinds of sampling and the other type (tree or chain). If
        no such round reached this depth, the prior is the estimate of the previous depth.

        Depths greater than 1 get a bonus of up to one standard deviation. More trials reduce the bonus to
        zero. Without the bonus, a few unlucky trials could end the use of deep drafts, and their acceptance
        would never be measured again. Depth 1 gets no bonus, because its acceptance mostly determines whether
        drafting is worthwhile.
        """
        found = self._rates.get((kind, chain))
        if found is not None:
            return found
        own = self._counts.get((kind, chain)) or _Counts()
        others = [counts for counts in self._counts.values() if counts is not own]
        rate, rates = PRIOR_ACCEPTANCE, []
        for depth in range(MAX_DEPTH):
            trials = sum(one.trials[depth] for one in others)
            successes = sum(one.successes[depth] for one in others)
            rate = (successes + PRIOR_STRENGTH * rate) / (trials + PRIOR_STRENGTH)
            strength = min(OTHERS_STRENGTH, PRIOR_STRENGTH + trials)
            trials += own.trials[depth]
            rate = (own.successes[depth] + strength * rate) / (own.trials[depth] + strength)
            unsure = max(0.0, 1.0 - trials / SURE_TRIALS) if depth else 0.0
            rates.append(min(1.0, rate + unsure * math.sqrt(rate * (1 - rate) / (trials + PRIOR_STRENGTH))))
        self._rates[kind, chain] = rates
        return rates

    def expected_tokens(self, kind: SamplingKind, chain: bool, level: int = 0) -> list[float]:
        """Return the expected tokens per round of a request that drafts to depth 0, 1, …, `MAX_DEPTH`.

        Args:
            kind: Kind of sampling.
            chain: True for chains, False for trees.
            level: Level of the request; see `SequenceAcceptance.level`.
        """
        found = self._expected.get((kind, chain, level))
        if found is not None:
            return found
        tokens, reach, shift = [1.0], 1.0, level / STEPS_PER_UNIT
        for rate in self.rates(kind, chain):
            reach *= rate if level == 0 else _probability(_log_odds(rate) + shift)
            tokens.append(tokens[-1] + reach)
        self._expected[kind, chain, level] = tokens
        return tokens


class SequenceAcceptance:
    """The acceptance of one request's drafts, relative to all requests with the same kind of sampling."""

    __slots__ = ("_accepted", "_drafter", "_expected", "_trials", "kind")

    def __init__(self, drafter: DrafterAcceptance, kind: SamplingKind) -> None:
        self.kind = kind
        self._drafter = drafter
        self._trials = self._accepted = self._expected = 0.0

    def follow(self, drafter: DrafterAcceptance) -> None:
        """Discard the measurements if another drafter now drafts for this request."""
        if drafter is not self._drafter:
            self._drafter = drafter
            self._trials = self._accepted = self._expected = 0.0

    def observe(self, chain: bool, accepted: int, offered_depth: int) -> None:
        """Record a round in which `accepted` nodes of `offered_depth` levels were accepted."""
        trials = min(accepted + 1, offered_depth, MAX_DEPTH)
        rates = self._drafter.rates(self.kind, chain)
        self._trials = self._trials * SEQUENCE_DECAY + trials
        self._accepted = self._accepted * SEQUENCE_DECAY + min(accepted, trials)
        self._expected = self._expected * SEQUENCE_DECAY + sum(rates[:trials])
        self._drafter.observe(self.kind, chain, accepted, offered_depth)

    @property
    def level(self) -> int:
        """The level of a request: a shift of the log-odds of acceptance, in steps of 1 / `STEPS_PER_UNIT`.

        A positive level means that drafts are accepted more often than for other requests with the same kind
        of sampling.
        """
        if not self._trials:
            return 0
        usual = self._expected / self._trials
        own = (self._accepted + SEQUENCE_STRENGTH * usual) / (self._trials + SEQUENCE_STRENGTH)
        level = round(STEPS_PER_UNIT * (_log_odds(own) - _log_odds(usual)))
        return max(-MOST_LEVEL, min(MOST_LEVEL, level))

    def expected_tokens(self, chain: bool) -> list[float]:
        """Return the expected numbers of tokens of rounds of depth 0, 1, ..., `MAX_DEPTH`."""
        return self._drafter.expected_tokens(self.kind, chain, self.level)


def _log_odds(rate: float) -> float:
    rate = max(LEAST_RATE, min(1 - LEAST_RATE, rate))
    return math.log(rate / (1 - rate))


def _probability(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))
