"""Estimates the cost (seconds) and the yield (tokens) of a round, from executed rounds.

The controller divides yield by cost and picks the draft shape with the most tokens per second.

Cost: `StepCosts` predicts the duration of a step from the step's batch size, rows and draft depth. In this
module, a row is one tree node of the pass. Rows are counted over all sequences and include the roots.

    step = wait for the proposal (depth, form)  +  verify pass (batch size, rows)  +  overhead

Each part is an exponential moving average of measured times. The times of sizes that were never executed are
interpolated. The parts of a round that stays on the device cannot be timed, so `StepCosts.round` is learned
as a whole.

Yield: `Acceptance` estimates p_d, the probability that the draft token at depth d is accepted if its parent
was accepted. The mean number of tokens of a round of depth D is the following sum. Its first term is the
token that the target itself adds.

    1 + p_1 + p_1 p_2 + ... + p_1 p_2 ... p_D

The estimate over all requests is the prior of each request's own estimate. Trees and chains are estimated
separately (`Acceptances`).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from outrider.shared.engine.buckets import power_of_2

COST_WEIGHT = 0.15
"""Weight of a new sample in the moving averages of costs."""
CHEAPER_WEIGHT = 0.5
"""Weight of a sample of the draft time that is below the moving average."""
POSTERIOR_DECAY = 0.95
"""Factor on the weight of older acceptance samples for each new sample."""
PRIOR_STRENGTH = 3.0
"""Weight of an acceptance's prior, as a number of samples."""
PRIOR_ACCEPTANCE = 0.6
"""Acceptance assumed at the first depth if nothing was measured."""
ROUNDS_TO_KNOW = 10
UNSEEN_ROW_COST = 0.03
"""Assumed cost of one more row until larger passes are measured, as a share of a plain step."""
FIXED_DRAFT_SHARE = 0.3
"""Share of a proposal's time that does not grow with depth. Used to scale a time to another depth."""
WAITS_KEPT = 128
PLAIN_ROUND = (1, 0)
"""Key of a round without drafts: one node per row, depth 0."""
TRIALS_TO_JUDGE = 4.0
"""Number of rounds, with decay, after which a form (tree or chain) counts as tried."""


class StepCosts:
    """Durations in seconds, learned as moving averages of executed steps.

    The averages are stored by these keys:

    - plain steps by batch size;
    - verify passes by (batch bucket, rows);
    - waits for a proposal by (depth, form), where the form is tree or chain;
    - overhead (scheduling, committing, delivering) as one number;
    - rounds on the device, as a whole, by (batch bucket, nodes per sequence, depth).

    Batch buckets are powers of 2. Shapes that were never executed are interpolated from their neighbours.
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
        """Record a verify pass over `rows` nodes of `batch_size` sequences."""
        if rows == batch_size:
            self._plain[batch_size] = _blend(self._plain.get(batch_size), seconds)
            return
        by_rows = self._verify.setdefault(power_of_2(batch_size), {})
        by_rows[rows] = _blend(by_rows.get(rows), seconds)

    def observe_round(self, batch_size: int, rows: int, depth: int, seconds: float) -> None:
        """Record a round on the device. `seconds` is counted from the end of the previous round."""
        known = self._rounds.setdefault(power_of_2(batch_size), {})
        key = (_nodes_per_row(batch_size, rows), depth)
        known[key] = _blend(known.get(key), seconds)

    def observe_plain_round(self, batch_size: int, seconds: float) -> None:
        """Record a plain round on the device as an upper bound for a plain step.

        A round on the device hides the host's overhead, so the overhead is subtracted.
        """
        self.observe_verify(batch_size, batch_size, max(seconds - self._overhead, 0.0))

    def observe_draft(self, depth: int, seconds: float, chain: bool = False) -> None:
        """Record how long a step waited for a proposal of `depth` levels."""
        average = self._draft.get((depth, chain))
        # Lower times get a greater weight than higher times, because the first proposals are slow with cold
        # caches.
        weight = CHEAPER_WEIGHT if average is not None and seconds < average else COST_WEIGHT
        self._draft[depth, chain] = _blend(average, seconds, weight)
        # A fast proposal also lowers the estimates of other depths that are scaled from its time.
        for (other, form), known in self._draft.items():
            implied = seconds * _draft_growth(other, depth)
            if form == chain and other != depth and implied < known:
                self._draft[other, form] = _blend(known, implied, CHEAPER_WEIGHT)

    def observe_answer(self, seconds: float) -> None:
        """Record the time from a proposal's announcement to its arrival."""
        self._waits.append(seconds)
        self._wait_p99 = None

    def observe_overhead(self, seconds: float) -> None:
        """Record the overhead of a step: scheduling, committing and delivering."""
        self._overhead = _blend(self._overhead or None, seconds)

    @property
    def num_answers(self) -> int:
        """Number of recent proposals whose times are known."""
        return len(self._waits)

    @property
    def answer_p99(self) -> float | None:
        """99th percentile of the times of recent proposals; None before the first."""
        if self._wait_p99 is None and self._waits:
            ordered = sorted(self._waits)
            self._wait_p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return self._wait_p99

    def plain_step(self, batch_size: int) -> float | None:
        """Return the duration of a plain step at this batch size or the nearest measured batch size.

        Return None before the first plain step.
        """
        exact = self._plain.get(batch_size)
        if exact is not None or not self._plain:
            return exact
        return self._plain[min(self._plain, key=lambda known: abs(known - batch_size))]

    def most_rows(self, batch_size: int) -> int:
        """Return the rows of the largest pass measured in this batch bucket, but at least `batch_size`."""
        on_device = (nodes * batch_size for nodes, _depth in self._rounds.get(power_of_2(batch_size), {}))
        return max(*self._verify.get(power_of_2(batch_size), {}), *on_device, batch_size, 1)

    def plain_round(self, batch_size: int) -> float | None:
        """Return the duration of a plain round on the device, measured at the nearest batch size.

        Return None before the first plain round.
        """
        known = [size for size, rounds in self._rounds.items() if PLAIN_ROUND in rounds]
        if not known:
            return None
        nearest = min(known, key=lambda size: abs(size - power_of_2(batch_size)))
        return self._rounds[nearest][PLAIN_ROUND]

    def round(self, batch_size: int, rows: int, depth: int) -> float:
        """Estimate the duration of a round on the device.

        For a measured shape, return the measured time. Otherwise extrapolate from the plain round and the
        next smaller measured shape. Before the first plain round, use `step`.

        The result is at least the time of every measured round that has no more nodes and no greater depth.
        The result is at most the time of every measured round that has no fewer nodes and no smaller depth.
        """
        known, nodes = self._rounds.get(power_of_2(batch_size), {}), _nodes_per_row(batch_size, rows)
        measured = known.get((nodes, depth))
        if measured is not None:
            return measured
        plain = self.plain_round(batch_size)
        if plain is None:
            return self.step(batch_size, rows, depth)
        # Extrapolate: each further node costs as much as a node of the next smaller shape.
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
        # A larger round takes at least as long as a smaller one.
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
        """Estimate the duration of a host-driven step: wait for a proposal, verify pass and overhead."""
        return self.draft(depth, chain) + self.verify(batch_size, rows) + self._overhead

    def verify(self, batch_size: int, rows: int) -> float:
        """Estimate the duration of a verify pass, interpolated between the plain step and measured passes."""
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
        """Estimate the wait for a proposal of `depth` levels.

        The estimate is 0 if nothing was measured, so that drafting is tried. A form (tree or chain) that was
        not measured is assumed to take as long as the other form.
        """
        if depth == 0 or not self._draft:
            return 0.0
        if (depth, chain) in self._draft:
            return self._draft[depth, chain]
        near = min(self._draft, key=lambda known: (known[1] != chain, abs(known[0] - depth)))
        return self._draft[near] * _draft_growth(depth, near[0])


class Prior(Protocol):
    """An estimate of acceptance that applies until a sequence or form has its own measurements."""

    __slots__ = ()

    @property
    def known(self) -> bool:
        """True if enough rounds were measured to rely on the estimate."""
        ...

    def seen(self, depth: int) -> bool:
        """Return True if any measured round has reached this depth."""
        ...

    def rate(self, depth: int) -> float:
        """Return the probability that a draft at `depth` (from 1) is accepted if its parent was accepted."""
        ...


class Acceptance(Prior):
    """For each depth, the probability that a draft token is accepted if its parent was accepted.

    Each depth has a posterior mean over decayed successes and trials, with `prior` worth `PRIOR_STRENGTH`
    trials. A request's prior is the estimate over all requests.
    """

    __slots__ = ("_prior", "_successes", "_trials")

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior
        self._trials: list[float] = []
        self._successes: list[float] = []

    def observe(self, accepted: int, offered_depth: int) -> None:
        """Record a round that offered nodes down to `offered_depth` and accepted `accepted` nodes."""
        while len(self._trials) < offered_depth:
            self._trials.append(0.0)
            self._successes.append(0.0)
        # Depths below the first rejection do not count as trials, because their parents were not accepted.
        for level in range(min(accepted + 1, offered_depth)):
            self._trials[level] = self._trials[level] * POSTERIOR_DECAY + 1.0
            self._successes[level] = self._successes[level] * POSTERIOR_DECAY + (
                1.0 if accepted > level else 0.0
            )

    @property
    def known(self) -> bool:
        own = self._trials[0] if self._trials else 0.0
        return own >= ROUNDS_TO_KNOW or (self._prior is not None and self._prior.known)

    @property
    def tried(self) -> bool:
        """True if this estimate has enough rounds of its own, without its prior."""
        return bool(self._trials) and self._trials[0] >= TRIALS_TO_JUDGE

    def rate(self, depth: int) -> float:
        prior = self._believed(depth)
        if depth > len(self._trials):
            return prior
        return (self._successes[depth - 1] + PRIOR_STRENGTH * prior) / (
            self._trials[depth - 1] + PRIOR_STRENGTH
        )

    def seen(self, depth: int) -> bool:
        return depth <= len(self._trials) or (self._prior is not None and self._prior.seen(depth))

    def _believed(self, depth: int) -> float:
        """Return the rate assumed for a depth before any round of this estimate reached it.

        The result is the prior's rate. If the prior never reached that depth, the result is the rate of the
        previous depth.
        """
        if self._prior is not None and (depth == 1 or self._prior.seen(depth)):
            return self._prior.rate(depth)
        return self.rate(depth - 1) if depth > 1 else PRIOR_ACCEPTANCE

    def expected_tokens(self, max_depth: int) -> list[float]:
        """Return the expected number of tokens of a round for each depth 0, 1, ..., `max_depth`."""
        expected = [1.0]
        reach = 1.0
        for depth in range(1, max_depth + 1):
            reach *= self.rate(depth)
            expected.append(expected[-1] + reach)
        return expected


class _ChainsLikeOthers(Prior):
    """Prior for the chains of one request.

    The prior is the acceptance of the request's own trees, scaled by the ratio of the acceptance of chains to
    that of trees over all requests.
    """

    __slots__ = ("_others", "_trees")

    def __init__(self, trees: Acceptance, others: Acceptances) -> None:
        self._trees = trees
        self._others = others

    @property
    def known(self) -> bool:
        return self._others.chains.known

    def seen(self, depth: int) -> bool:
        return self._others.chains.seen(depth)

    def rate(self, depth: int) -> float:
        of_trees = self._others.trees.rate(depth)
        share = min(1.0, self._others.chains.rate(depth) / of_trees) if of_trees else 1.0
        return self._trees.rate(depth) * share


class Acceptances:
    """Acceptance of trees and of chains. A chain has no siblings, so it is usually accepted less often."""

    __slots__ = ("chains", "trees")

    def __init__(self, prior: Acceptances | None = None) -> None:
        self.trees: Acceptance = Acceptance(prior.trees if prior else None)
        # Until chains were tried, they are assumed to be accepted as often as trees.
        self.chains: Acceptance = Acceptance(_ChainsLikeOthers(self.trees, prior) if prior else self.trees)

    def of(self, chain: bool) -> Acceptance:
        """Return the acceptance of chains or the acceptance of trees."""
        return self.chains if chain else self.trees


def _nodes_per_row(batch_size: int, rows: int) -> int:
    return -(-rows // batch_size)


def _draft_growth(depth: int, measured: int) -> float:
    """Return the time of a proposal of `depth` levels divided by that of one of `measured` levels."""
    return FIXED_DRAFT_SHARE + (1 - FIXED_DRAFT_SHARE) * depth / measured


def _blend(average: float | None, sample: float, weight: float = COST_WEIGHT) -> float:
    """Return the average after one more sample. The sample counts as at most four times the average."""
    return sample if average is None else average + weight * (min(sample, 4 * average) - average)
