"""What a step costs and what drafting yields, learned online: the two halves of the controller's objective."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from outrider.shared.engine.buckets import power_of_2

COST_WEIGHT = 0.15
CHEAPER_WEIGHT = 0.5
POSTERIOR_DECAY = 0.95
PRIOR_STRENGTH = 3.0
PRIOR_ACCEPTANCE = 0.6
ROUNDS_TO_KNOW = 10
UNSEEN_ROW_COST = 0.03
"""Share of a plain step that one more row is taken to cost before anything was measured."""
FIXED_DRAFT_SHARE = 0.3
"""Share of a proposal's time that does not grow with depth, until two depths were measured."""
WAITS_KEPT = 128
PLAIN_ROUND = (1, 0)
"""Nodes of a row and depth of a round without drafts."""
TRIALS_TO_JUDGE = 4.0


class StepCosts:
    """Seconds of verifying by (batch size, rows), of waiting for a proposal by depth (of trees and of chains), and of everything else.

    Moving averages over what was executed; shapes never executed are interpolated from their neighbours. Rounds that stay on the device
    have no parts that could be timed: they are learnt whole, by (batch bucket, nodes of a row, depth), and where one is known it counts.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._verify: dict[int, dict[int, float]] = {}
        self._draft: dict[tuple[int, bool], float] = {}
        self._rounds: dict[int, dict[tuple[int, int], float]] = {}
        self._overhead = 0.0
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self._wait_p99: float | None = None

    def observe_verify(self, batch_size: int, rows: int, seconds: float) -> None:
        """Learn from one verify pass over `rows` nodes of `batch_size` sequences."""
        if rows == batch_size:
            self._plain[batch_size] = _blend(self._plain.get(batch_size), seconds)
            return
        by_rows = self._verify.setdefault(power_of_2(batch_size), {})
        by_rows[rows] = _blend(by_rows.get(rows), seconds)

    def observe_round(self, batch_size: int, rows: int, depth: int, seconds: float) -> None:
        """Learn from one round on the device: how long after the round before it was read."""
        known = self._rounds.setdefault(power_of_2(batch_size), {})
        key = (_nodes_per_row(batch_size, rows), depth)
        known[key] = _blend(known.get(key), seconds)

    def observe_plain_round(self, batch_size: int, seconds: float) -> None:
        """Learn that a plain step need take no longer than a plain round on the device, which hides the overhead."""
        self.observe_verify(batch_size, batch_size, max(seconds - self._overhead, 0.0))

    def observe_draft(self, depth: int, seconds: float, chain: bool = False) -> None:
        """Learn how long a proposal of `depth` levels kept the step waiting."""
        average = self._draft.get((depth, chain))
        # Quick to believe that drafting is cheap (the first proposals are cold), slow to believe that it is dear.
        weight = CHEAPER_WEIGHT if average is not None and seconds < average else COST_WEIGHT
        self._draft[depth, chain] = _blend(average, seconds, weight)
        for (other, form), known in self._draft.items():
            implied = seconds * _draft_growth(other, depth)
            if form == chain and other != depth and implied < known:
                self._draft[other, form] = _blend(known, implied, CHEAPER_WEIGHT)

    def observe_answer(self, seconds: float) -> None:
        """Learn how long a proposal took from its announcement to its arrival."""
        self._waits.append(seconds)
        self._wait_p99 = None

    def observe_overhead(self, seconds: float) -> None:
        """Learn the rest of a step: scheduling, committing, delivering."""
        self._overhead = _blend(self._overhead or None, seconds)

    @property
    def num_answers(self) -> int:
        """How many of the latest proposals' times are known."""
        return len(self._waits)

    @property
    def answer_p99(self) -> float | None:
        """99th percentile of the latest proposals' times."""
        if self._wait_p99 is None and self._waits:
            ordered = sorted(self._waits)
            self._wait_p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return self._wait_p99

    def plain_step(self, batch_size: int) -> float | None:
        """Seconds of a plain step at this batch size, or at the nearest one measured; None before the first plain step."""
        exact = self._plain.get(batch_size)
        if exact is not None or not self._plain:
            return exact
        return self._plain[min(self._plain, key=lambda known: abs(known - batch_size))]

    def most_rows(self, batch_size: int) -> int:
        """Return the rows of the largest pass measured at about this batch size; at least those of a plain step."""
        on_device = (nodes * batch_size for nodes, _depth in self._rounds.get(power_of_2(batch_size), {}))
        return max(*self._verify.get(power_of_2(batch_size), {}), *on_device, batch_size, 1)

    def plain_round(self, batch_size: int) -> float | None:
        """Seconds of a plain round on the device at this batch size, or at the nearest one measured; None before the first."""
        known = [size for size, rounds in self._rounds.items() if PLAIN_ROUND in rounds]
        if not known:
            return None
        nearest = min(known, key=lambda size: abs(size - power_of_2(batch_size)))
        return self._rounds[nearest][PLAIN_ROUND]

    def round(self, batch_size: int, rows: int, depth: int) -> float:
        """Estimate a round on the device: as measured; else it grows as measured rounds do, and no larger one takes less."""
        known, nodes = self._rounds.get(power_of_2(batch_size), {}), _nodes_per_row(batch_size, rows)
        measured = known.get((nodes, depth))
        if measured is not None:
            return measured
        plain = self.plain_round(batch_size)
        if plain is None:
            return self.step(batch_size, rows, depth)
        smaller = max((key for key in known if 1 < key[0] <= nodes), default=None)
        if smaller is not None:
            estimate = known[smaller] + max(0.0, known[smaller] - plain) * (nodes - smaller[0]) / (
                smaller[0] - 1
            )
        elif self.plain_step(batch_size) is None:
            estimate = plain * (1.0 + UNSEEN_ROW_COST * (rows - batch_size) / batch_size)
        else:
            estimate = (
                plain
                + self.draft(depth)
                + self.verify(batch_size, rows)
                - self.verify(batch_size, batch_size)
            )
        least = max(
            (seconds for (of, levels), seconds in known.items() if of <= nodes and levels <= depth),
            default=0.0,
        )
        most = min(
            (seconds for (of, levels), seconds in known.items() if of >= nodes and levels >= depth),
            default=estimate,
        )
        return max(least, min(estimate, most))

    def step(self, batch_size: int, rows: int, depth: int, chain: bool = False) -> float:
        """Estimate a whole step: waiting for a proposal, verifying, and the rest."""
        return self.draft(depth, chain) + self.verify(batch_size, rows) + self._overhead

    def verify(self, batch_size: int, rows: int) -> float:
        """Estimate a verify pass."""
        plain = self.plain_step(batch_size)
        if plain is None:
            return 1.0 + UNSEEN_ROW_COST * rows
        if rows <= batch_size:
            return plain
        by_rows = self._verify.get(power_of_2(batch_size), {})
        lower, lower_s, upper, upper_s = batch_size, plain, 0, 0.0
        for known, seconds in by_rows.items():
            if known == rows:
                return seconds
            if lower < known < rows:
                lower, lower_s = known, seconds
            elif known > rows and (not upper or known < upper):
                upper, upper_s = known, seconds
        if upper:
            return lower_s + (upper_s - lower_s) * (rows - lower) / (upper - lower)
        if lower > batch_size:
            return max(lower_s, lower_s + (lower_s - plain) * (rows - lower) / (lower - batch_size))
        return plain * (1.0 + UNSEEN_ROW_COST * (rows - batch_size) / batch_size)

    def draft(self, depth: int, chain: bool = False) -> float:
        """Estimate the wait for a proposal of `depth` levels; 0 before any was measured, so that drafting is tried.

        A chain is taken to need no longer than a tree where none was measured, and the other way round.
        """
        if depth == 0 or not self._draft:
            return 0.0
        if (depth, chain) in self._draft:
            return self._draft[depth, chain]
        near = min(self._draft, key=lambda known: (known[1] != chain, abs(known[0] - depth)))
        return self._draft[near] * _draft_growth(depth, near[0])


class Prior(Protocol):
    """What is believed of an acceptance before it was seen."""

    @property
    def known(self) -> bool:
        """Whether enough rounds were seen to rely on it."""
        ...

    def seen(self, depth: int) -> bool:
        """Whether any round was so deep."""
        ...

    def rate(self, depth: int) -> float:
        """Probability that depth `depth` (from 1) is accepted given the one above it."""
        ...


class Acceptance:
    """How likely the node at depth d is accepted once depth d - 1 was: one posterior per depth, old evidence fading.

    A request's own posterior starts from the engine's (`prior`), which has seen all requests.
    """

    __slots__ = ("_prior", "_successes", "_trials")

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior
        self._trials: list[float] = []
        self._successes: list[float] = []

    def observe(self, accepted: int, offered_depth: int) -> None:
        """Learn from one round that offered nodes down to `offered_depth` and accepted `accepted` of them."""
        while len(self._trials) < offered_depth:
            self._trials.append(0.0)
            self._successes.append(0.0)
        for level in range(min(accepted + 1, offered_depth)):
            self._trials[level] = self._trials[level] * POSTERIOR_DECAY + 1.0
            self._successes[level] = self._successes[level] * POSTERIOR_DECAY + (
                1.0 if accepted > level else 0.0
            )

    @property
    def known(self) -> bool:
        """Whether enough rounds were seen, by this posterior and those before it, to rely on it."""
        own = self._trials[0] if self._trials else 0.0
        return own >= ROUNDS_TO_KNOW or (self._prior is not None and self._prior.known)

    @property
    def tried(self) -> bool:
        """Whether rounds were seen by this posterior itself."""
        return bool(self._trials) and self._trials[0] >= TRIALS_TO_JUDGE

    def rate(self, depth: int) -> float:
        """Probability that depth `depth` (from 1) is accepted given the one above it."""
        prior = self._believed(depth)
        if depth > len(self._trials):
            return prior
        return (self._successes[depth - 1] + PRIOR_STRENGTH * prior) / (
            self._trials[depth - 1] + PRIOR_STRENGTH
        )

    def seen(self, depth: int) -> bool:
        """See `Prior.seen`."""
        return depth <= len(self._trials) or (self._prior is not None and self._prior.seen(depth))

    def _believed(self, depth: int) -> float:
        """Return the rate before any round so deep: the prior's, or where it knows no more that of the depth above."""
        if self._prior is not None and (depth == 1 or self._prior.seen(depth)):
            return self._prior.rate(depth)
        return self.rate(depth - 1) if depth > 1 else PRIOR_ACCEPTANCE

    def expected_tokens(self, max_depth: int) -> list[float]:
        """Return the tokens that a round of depth 0, 1, ..., `max_depth` is expected to emit."""
        expected = [1.0]
        reach = 1.0
        for depth in range(1, max_depth + 1):
            reach *= self.rate(depth)
            expected.append(expected[-1] + reach)
        return expected


class _ChainsLikeOthers:
    """What a request's chains are taken for: as much worse than its trees as all requests' chains are."""

    __slots__ = ("_others", "_trees")

    def __init__(self, trees: Acceptance, others: Acceptances) -> None:
        self._trees = trees
        self._others = others

    @property
    def known(self) -> bool:
        """See `Prior.known`."""
        return self._others.chains.known

    def seen(self, depth: int) -> bool:
        """See `Prior.seen`."""
        return self._others.chains.seen(depth)

    def rate(self, depth: int) -> float:
        """See `Prior.rate`."""
        of_trees = self._others.trees.rate(depth)
        share = min(1.0, self._others.chains.rate(depth) / of_trees) if of_trees else 1.0
        return self._trees.rate(depth) * share


class Acceptances:
    """What was accepted of trees, and of chains, which have no siblings to fall back on."""

    __slots__ = ("chains", "trees")

    def __init__(self, prior: Acceptances | None = None) -> None:
        self.trees: Acceptance = Acceptance(prior.trees if prior else None)
        # Before one was tried, a chain is taken to be as good as a tree.
        self.chains: Acceptance = Acceptance(_ChainsLikeOthers(self.trees, prior) if prior else self.trees)

    def of(self, chain: bool) -> Acceptance:
        """Return that of one form."""
        return self.chains if chain else self.trees


def _nodes_per_row(batch_size: int, rows: int) -> int:
    return -(-rows // batch_size)


def _draft_growth(depth: int, measured: int) -> float:
    """Return how much longer a proposal of `depth` levels takes than one of `measured` levels."""
    return FIXED_DRAFT_SHARE + (1 - FIXED_DRAFT_SHARE) * depth / measured


def _blend(average: float | None, sample: float, weight: float = COST_WEIGHT) -> float:
    return sample if average is None else average + weight * (min(sample, 4 * average) - average)
