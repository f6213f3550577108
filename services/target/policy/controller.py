"""Chooses how many tokens each `auto` request drafts in the next round, from none to the largest shape.

The controller maximises the expected tokens per second of the whole batch. A row is one request of the batch.
`partition` divides the rows among tree shapes and plain decoding. `RoundCosts` estimates the seconds of a
round, and `DrafterAcceptance` estimates its tokens, both from executed rounds (`observe`).

A decision is kept for several rounds, because a change of shape needs other CUDA graphs. Estimates become
outdated, so a decision may include a *look* (see `looks`): for a few rounds, some rows draft with an unused
shape, or all rows decode plainly. A new drafter is first used in looks. The time that looks may lose is
limited for the whole server.

The estimates are kept when requests end, and when a draft with the same identity reconnects. The controller
runs no model, so tests can run it against simulated machines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.services.target.policy.acceptance import DrafterAcceptance, SamplingKind
from outrider.services.target.policy.cost_model import SHORTEST_S, DraftPath, RoundCosts
from outrider.services.target.policy.expectations import Expectations, Tokens, expected_tokens
from outrider.services.target.policy.looks import LOOK_ROUNDS, LOOK_ROWS, Looks
from outrider.services.target.policy.offered_shapes import cut
from outrider.services.target.policy.partition import Others, Partition, Partitions
from outrider.services.target.policy.row_state import ExecutedRow, ExecutedStep, RowBound, RowState
from outrider.services.target.policy.verdict import DecisionLog, Reason, Verdict
from outrider.services.target.policy.wait_cap import wait_cap_s
from outrider.shared.engine.buckets import power_of_2
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

__all__ = ["ExecutedRow", "ExecutedStep", "RowBound", "RowState", "SpeculationController"]

ROUNDS_PER_CHOICE = 8
"""Number of rounds for which a decision is kept while rows draft."""
PLAIN_ROUNDS_PER_CHOICE = 4
FIRST_PLAIN_ROUNDS = 2
"""Number of plain rounds to run at a new batch size. The second is planned before the first ends."""
ADVANTAGE = 1.01
"""Other shapes replace those in use if their expected rate is at least this multiple of the current rate."""
SURPRISE = 1.5
"""A round that takes longer than this multiple of its estimate leads to a new decision."""
MOST_DRAFTERS = 8
"""Number of drafters whose acceptance is kept."""
LOOKS_APART = 64
"""A look prefers rows with few tokens that the drafter has not processed, and with few earlier looks. This
many tokens weigh as much as one look."""


@dataclass(slots=True)
class _Decision:
    """A choice for the next rounds.

    Attributes:
        number: Identifies the decision.
        partition: The best partition. It applies to all rows that take no part in the look.
        look: The shape that the look measures, or `NO_DRAFT` if all rows decode plainly. None without a look.
        path: Where the trees come from.
        bucket: Bucket of the batch size.
        rounds_left: Number of further rounds for which the decision is kept.
    """

    number: int
    partition: Partition
    look: DraftShape | None
    path: DraftPath
    bucket: int
    rounds_left: int

    def looked(self, step: ExecutedStep) -> bool:
        """Return True if a round was part of this decision's look."""
        if self.look is None:
            return False
        drafted = {row.shape for row in step.rows if row.state is not None and row.shape.drafts}
        if not self.look.drafts:
            return not drafted
        return any(
            shape not in self.partition.shapes and (shape.topk == 1) is (self.look.topk == 1)
            for shape in drafted
        )


class SpeculationController:
    """Chooses draft shapes and learns from executed rounds. One instance per engine. Engine thread only.

    Args:
        log: Logs decisions. By default, decisions are logged to the target's log.

    Attributes:
        costs: Estimates of the durations of rounds.
        verdict: The last decision, which other threads may read.
    """

    def __init__(self, log: DecisionLog | None = None) -> None:
        self.costs = RoundCosts()
        self.verdict = Verdict()
        self._log = log or DecisionLog()
        self._identity = ""
        self._drafter = DrafterAcceptance()
        self._drafters = {self._identity: self._drafter}
        self._looks = Looks()
        self._decision: _Decision | None = None
        self._previous: _Decision | None = None
        self._count = 0
        self._draft_rate: float | None = None

    def adopt(self, identity: str) -> None:
        """Use the estimates of another drafter from now on. The estimates of the last few drafters are kept.

        Args:
            identity: Identifies the drafter. A drafter has the same identity after a restart.
        """
        if identity == self._identity:
            return
        self._identity = identity
        self._drafter = self._drafters.pop(identity, DrafterAcceptance())
        self._drafters[identity] = self._drafter
        while len(self._drafters) > MOST_DRAFTERS:
            del self._drafters[next(iter(self._drafters))]
        self._end_decision()

    def forget_acceptance(self) -> None:
        """Discard learned acceptance but keep learned costs, because warm-up text is unlike real requests."""
        self._drafter = DrafterAcceptance()
        self._drafters = {self._identity: self._drafter}
        self._looks = Looks()
        self._draft_rate = None
        self.verdict = Verdict()
        self._end_decision()

    def new_row(self, kind: SamplingKind = SamplingKind.GREEDY) -> RowState:
        """Return the state of a new request, with the drafter's acceptance for `kind` as its prior."""
        return RowState(self._drafter, kind)

    # ---- choose

    def choose(
        self, rows: Sequence[RowBound], others: Sequence[DraftShape] = (), path: DraftPath = DraftPath.DEVICE
    ) -> list[DraftShape]:
        """Choose a shape for each row, within the row's bounds.

        Args:
            rows: The `auto` rows of the round.
            others: The shapes of the other rows of the round, `NO_DRAFT` included.
            path: Where the trees come from.
        """
        if not rows:
            return []
        decision, bucket = self._decision, power_of_2(len(rows) + len(others))
        if (
            decision is None
            or decision.rounds_left <= 0
            or (decision.path, decision.bucket) != (path, bucket)
        ):
            decision = self._decide(rows, Counter(others), path)
        decision.rounds_left -= 1
        return [self._shape(row, decision) for row in rows]

    def would_draft(self, row: RowBound) -> bool:
        """Return True if a request that joined now would draft in its first round."""
        decision = self._decision
        if decision is None or row.useful_depth <= 0:
            return False
        return decision.partition.shape_for(expected_tokens(row)).drafts

    def draft_away(self, rows: int, batch_size: int) -> None:
        """Note that the draft cannot draft for any of the `auto` rows of a round."""
        if self.verdict.reason is not Reason.DRAFT_AWAY:
            self.verdict = Verdict(Reason.DRAFT_AWAY, plain_rows=rows, batch_size=batch_size)
            self._log.note(self.verdict)

    def _shape(self, row: RowBound, decision: _Decision) -> DraftShape:
        state = row.state
        if state.decision != decision.number:  # the row has joined since
            look = decision.look
            state.shape = decision.partition.shape_for(expected_tokens(row))
            if look is not None and not look.drafts:
                state.shape = NO_DRAFT
            state.decision = decision.number
        shape = state.shape
        if not shape.drafts or row.useful_depth <= 0:
            return NO_DRAFT
        if decision.path is DraftPath.HOST and shape.depth > row.useful_depth:
            shape = cut(shape, row.useful_depth)
        state.drafted_len = row.committed_len
        return shape

    def _decide(
        self, rows: Sequence[RowBound], fixed: Mapping[DraftShape, int], path: DraftPath
    ) -> _Decision:
        # 1. Estimate.
        drafter = self._drafter
        drafter.refresh()
        for row in rows:
            row.state.acceptance.follow(drafter)
        expectations = Expectations(rows)
        expected = expectations.tokens
        others = Others(fixed, sum(count * self._tokens_of(shape) for shape, count in fixed.items()))
        all_plain = others.nodes == others.rows
        batch_size = len(rows) + others.rows
        partitions = Partitions(expectations.classes(), others, self.costs, path)
        # 2. Choose the best partition, as far as enough is known.
        unmeasured = self.costs.plain(batch_size) is None
        unmeasured |= all_plain and not self.costs.knows_plain(batch_size)
        best = partitions.plain
        if not unmeasured and drafter.known:
            kept = self._decision.partition.shapes if self._decision is not None else ()
            best = partitions.best(kept, ADVANTAGE)
        # 3. Assign the shapes, and let some rows look if that is affordable.
        self._count += 1
        _assign(rows, expected, best, self._count)
        look = None if unmeasured else self._add_look(rows, expected, best, partitions, others)
        left = ROUNDS_PER_CHOICE if best.shapes else PLAIN_ROUNDS_PER_CHOICE
        left = FIRST_PLAIN_ROUNDS if unmeasured else LOOK_ROUNDS if look is not None else left
        decision = _Decision(self._count, best, look, path, power_of_2(batch_size), left)
        self._previous, self._decision = self._decision, decision
        # 4. Report the reason.
        if look is not None:
            reason = Reason.PROBING
        elif unmeasured or not drafter.known:
            reason = Reason.UNMEASURED
        else:
            reason = Reason.PAYS if best.shapes else Reason.DOES_NOT_PAY
        shapes = Counter(row.state.shape for row in rows if row.state.shape.drafts)
        self.verdict = Verdict(
            reason,
            dict(shapes),
            len(rows) - sum(shapes.values()),
            batch_size,
            None if unmeasured or not drafter.known else best.rate / partitions.plain.rate,
            None if unmeasured else best.seconds,
        )
        self._log.note(self.verdict)
        return decision

    def _tokens_of(self, shape: DraftShape) -> float:
        """Return the expected tokens of a row with a fixed shape, whose kind of sampling is not known."""
        if not shape.drafts:
            return 1.0
        tokens = self._drafter.expected_tokens(SamplingKind.GREEDY, shape.topk == 1)
        return tokens[min(shape.depth, len(tokens) - 1)]

    def _add_look(
        self,
        rows: Sequence[RowBound],
        expected: Sequence[Tokens],
        best: Partition,
        partitions: Partitions,
        others: Others,
    ) -> DraftShape | None:
        """If a look is affordable, change the shapes of some rows. Return the shape that is measured."""
        if not self._looks.affordable:
            return None
        # 1. A look takes a few rows whose drafter catches up fast and that took part in few looks. If that is
        #    cheaper, the look takes all rows that draft, because no row then needs a draft of the old shape.
        able = [index for index, row in enumerate(rows) if row.useful_depth > 0]
        able.sort(key=lambda index: rows[index].lag + LOOKS_APART * rows[index].state.looks)
        drafting = [index for index in able if rows[index].state.shape.drafts]
        # 2. What would a look cost?
        costs: dict[DraftShape, tuple[float, list[int]]] = {}
        for looking in filter(None, (able[:LOOK_ROWS], drafting)):
            for shape in partitions.offered:
                if not any(shape in expected[index] for index in looking):
                    continue
                loss_s = self._look_loss(rows, expected, best, partitions, others, looking, shape)
                if shape not in best.shapes and loss_s < costs.get(shape, (math.inf, []))[0]:
                    costs[shape] = (loss_s, looking)
        if best.shapes and others.nodes == others.rows:
            costs[NO_DRAFT] = (partitions.plain.seconds - partitions.batch_size / best.rate, able)
        # 3. Look.
        plain_s = self.costs.plain(partitions.batch_size) or 0.0
        look = self._looks.next({shape: loss_s for shape, (loss_s, _) in costs.items()}, plain_s)
        if look is None:
            return None
        for index in costs[look][1]:
            if not look.drafts or look in expected[index]:
                rows[index].state.shape = look
                rows[index].state.looks += look.drafts
        return look

    def _look_loss(
        self,
        rows: Sequence[RowBound],
        expected: Sequence[Tokens],
        best: Partition,
        partitions: Partitions,
        others: Others,
        looking: Sequence[int],
        shape: DraftShape,
    ) -> float:
        """Return the seconds that a round loses if the rows `looking` draft with `shape`."""
        groups = Counter({of: count for of, count in others.shapes.items() if of.drafts})
        tokens, nodes, moved = others.tokens, others.nodes, set(looking)
        for index, row in enumerate(rows):
            own = shape if index in moved and shape in expected[index] else row.state.shape
            tokens += expected[index].get(own, 1.0) if self._drafter.known else 1.0
            nodes += own.max_nodes
            if own.drafts:
                groups[own] += 1
        if nodes > partitions.most_rows:
            return math.inf
        return self.costs.round(partitions.batch_size, nodes, groups, partitions.path) - tokens / best.rate

    # ---- learn

    def observe(self, step: ExecutedStep) -> None:
        """Learn the costs, the speedup over plain rounds and each row's acceptance from an executed round."""
        if not step.provisional:
            self._learn_times(step)
        for row in step.rows:
            if row.num_nodes > 1 and row.shape.drafts:
                chain, depth = row.shape.topk == 1, row.shape.depth
                if row.state is None:
                    self._drafter.observe(row.kind, chain, row.accepted, depth)
                else:
                    row.state.acceptance.observe(chain, row.accepted, depth)

    def _learn_times(self, step: ExecutedStep) -> None:
        batch_size, costs = len(step.rows), self.costs
        nodes = sum(row.num_nodes for row in step.rows)
        drafts = bool(step.requested)
        costs.observe_verify(batch_size, nodes, step.verify_s)
        costs.observe_rest(batch_size, drafts, step.round_s - step.draft_s - step.verify_s)
        if not step.catches_up:
            costs.observe_drafts(step.requested, step.path, step.draft_s)
        plain_s, tokens = costs.plain(batch_size), batch_size + sum(row.accepted for row in step.rows)
        # The duration without the prompts that ran between the rounds.
        seconds = max(SHORTEST_S, step.draft_s + step.verify_s + costs.rest(batch_size, drafts))
        if plain_s is not None:
            plain_s += costs.rest(batch_size, False)
            self._account(step, tokens, seconds, plain_s)
            if nodes > batch_size and not step.catches_up:
                ratio = tokens / batch_size * plain_s / seconds
                self._draft_rate = (
                    ratio if self._draft_rate is None else self._draft_rate + 0.1 * (ratio - self._draft_rate)
                )

    def _account(self, step: ExecutedStep, tokens: int, seconds: float, plain_s: float) -> None:
        """Charge a look for the time of its round, and end a decision whose round was surprisingly slow."""
        if all(row.state is None for row in step.rows):
            return
        self._looks.earn(seconds, plain_s)
        for decision in (self._decision, self._previous):
            if decision is not None and decision.looked(step):
                look = decision.look
                assert look is not None
                self._looks.spend(look, seconds - tokens / decision.partition.rate)
                return
        decision, bucket = self._decision, power_of_2(len(step.rows))
        if decision is None or decision.look is not None or decision.bucket != bucket:
            return
        if step.requested and not step.catches_up and seconds > SURPRISE * decision.partition.seconds:
            decision.rounds_left = 0

    def wait_cap_s(self, rows: Sequence[RowBound], batch_size: int) -> float:
        """Return the maximum time in seconds that a round waits for the proposals of its `auto` rows."""
        return wait_cap_s(rows, batch_size, self.costs, known=self._drafter.known)

    @property
    def speedup_estimate(self) -> float | None:
        """Tokens per second of recent drafting rounds, relative to plain rounds of the same batch size.

        The value is None until both a drafting round and a plain round have been measured.
        """
        return self._draft_rate

    @property
    def lost_s(self) -> float:
        """Seconds that looks have lost so far, compared with the best choices."""
        return self._looks.lost_s

    def _end_decision(self) -> None:
        self._decision = self._previous = None


def _assign(
    rows: Sequence[RowBound],
    expected: Sequence[Tokens],
    partition: Partition,
    number: int,
) -> None:
    """Assign a shape to each row. No shape is assigned to more rows than `Partition.counts` allows."""
    left = dict(partition.counts)
    gains = [partition.gain_for(tokens) for tokens in expected]
    for index in sorted(range(len(rows)), key=lambda index: (-gains[index], rows[index].lag)):
        shape = partition.shape_for(expected[index])
        if shape.drafts and not left.get(shape):
            shape = NO_DRAFT
        elif shape.drafts:
            left[shape] -= 1
        rows[index].state.shape = shape
        rows[index].state.decision = number
