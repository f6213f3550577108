"""Chooses how many tokens each `auto` request drafts in the next round, from none to the largest tree shape.

An `auto` request is a request in speculation mode `auto`. The controller maximises the expected tokens per
second of the whole batch. `partition` divides the requests of the batch among tree shapes and plain decoding.
`StepCosts` estimates the seconds of a round, and `DrafterAcceptance` estimates its tokens. Both learn from
executed rounds (`observe`).

A decision is kept for several rounds, because a change of shape needs other CUDA graphs. Estimates become
outdated. A decision may therefore include a *look* (see `looks`), which lasts a few rounds. In a look, some
requests draft with an unused shape, or all requests decode plainly. A new drafter is first used in looks. The
time that looks may lose is limited for the whole server.

The estimates are kept when requests end, and when a draft with the same identity reconnects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from outrider.services.target.policy.acceptance import DrafterAcceptance, SamplingKind
from outrider.services.target.policy.controller_inputs import (
    EntryBound,
    ExecutedEntry,
    ExecutedStep,
    SequenceState,
)
from outrider.services.target.policy.cost_model import SHORTEST_S, DraftPath, StepCosts
from outrider.services.target.policy.decision import Decision, assign_shapes
from outrider.services.target.policy.expectations import Expectations, ExpectedTokens, expected_tokens
from outrider.services.target.policy.look_options import LookOptions
from outrider.services.target.policy.looks import Look, Looks
from outrider.services.target.policy.offered_shapes import cut
from outrider.services.target.policy.partition import Others, Partition, Partitions
from outrider.services.target.policy.verdict import AutoReason, AutoVerdict, DecisionLog
from outrider.services.target.policy.wait_cap import wait_cap_s
from outrider.shared.engine.buckets import power_of_2
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

__all__ = ["EntryBound", "ExecutedEntry", "ExecutedStep", "SequenceState", "SpeculationController"]

ROUNDS_PER_CHOICE = 8
"""Number of rounds for which a decision is kept while entries draft."""
PLAIN_ROUNDS_PER_CHOICE = 4
FIRST_PLAIN_ROUNDS = 2
"""Number of plain rounds to run at a new batch size. The second is planned before the first ends."""
ADVANTAGE = 1.01
"""Other shapes replace those in use if their expected rate is at least this multiple of the current rate."""
SURPRISE = 1.5
"""A round that takes longer than this multiple of its estimate leads to a new decision."""
MOST_DRAFTERS = 8
"""Number of drafters whose acceptance is kept."""


class SpeculationController:
    """Chooses tree shapes for `auto` requests and learns from executed rounds.

    There is one controller per engine. Engine thread only.

    Args:
        log: Logs decisions. By default, decisions are logged to the target's log.

    Attributes:
        costs: Estimates of the durations of rounds.
        verdict: The last decision, which other threads may read.
    """

    def __init__(self, log: DecisionLog | None = None) -> None:
        self.costs = StepCosts()
        self.verdict = AutoVerdict()
        self._log = log or DecisionLog()
        self._identity = ""
        self._drafter = DrafterAcceptance()
        self._drafters = {self._identity: self._drafter}
        self._looks = Looks()
        self._decision: Decision | None = None
        self._previous: Decision | None = None
        self._count = 0
        self._draft_rate: float | None = None

    def adopt(self, identity: str) -> None:
        """Use the estimates of another drafter from now on. The estimates of the last few drafters are kept.

        Args:
            identity: Identifies the drafter. A drafter that restarts keeps its identity.
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
        self.verdict = AutoVerdict()
        self._log.forget()
        self._end_decision()

    def new_state(self, kind: SamplingKind = SamplingKind.GREEDY) -> SequenceState:
        """Return the state of a new request, with the drafter's acceptance for `kind` as its prior."""
        return SequenceState(self._drafter, kind)

    # ---- choose

    def choose(
        self,
        entries: Sequence[EntryBound],
        others: Sequence[DraftShape] = (),
        path: DraftPath = DraftPath.DEVICE,
    ) -> list[DraftShape]:
        """Choose a tree shape for each `auto` request of a round, within the request's limits.

        Args:
            entries: The `auto` requests of the round.
            others: The shapes of the other requests of the round, including `NO_DRAFT`.
            path: Where the trees come from.
        """
        if not entries:
            return []
        decision, bucket = self._decision, power_of_2(len(entries) + len(others))
        if (
            decision is None
            or decision.rounds_left <= 0
            or (decision.path, decision.bucket) != (path, bucket)
        ):
            decision = self._decide(entries, Counter(others), path)
        decision.rounds_left -= 1
        return [self._shape(entry, decision) for entry in entries]

    def would_draft(self, entry: EntryBound) -> bool:
        """Return True if a request that joined now would draft in its first round."""
        decision = self._decision
        if decision is None or entry.useful_depth <= 0:
            return False
        return decision.partition.shape_for(expected_tokens(entry)).drafts

    def draft_away(self, entries: int, batch_size: int) -> None:
        """Note that the draft cannot draft for any of the `auto` entries of a round."""
        if self.verdict.reason is not AutoReason.DRAFT_AWAY:
            self.verdict = AutoVerdict(AutoReason.DRAFT_AWAY, plain_rows=entries, batch_size=batch_size)
            self._log.note(self.verdict)

    def _shape(self, entry: EntryBound, decision: Decision) -> DraftShape:
        state = entry.state
        if state.decision != decision.number:  # the entry has joined since
            look = decision.look
            state.shape = decision.partition.shape_for(expected_tokens(entry))
            if look is not None and not look.shape.drafts:
                state.shape = NO_DRAFT
            state.decision = decision.number
        shape = state.shape
        if not shape.drafts or entry.useful_depth <= 0:
            return NO_DRAFT
        if decision.path is DraftPath.HOST and shape.depth > entry.useful_depth:
            shape = cut(shape, entry.useful_depth)
        state.drafted_len = entry.committed_len
        return shape

    def _decide(
        self, entries: Sequence[EntryBound], fixed: Mapping[DraftShape, int], path: DraftPath
    ) -> Decision:
        # 1. Estimate.
        drafter = self._drafter
        drafter.refresh()
        self.costs.age()
        for entry in entries:
            entry.state.acceptance.follow(drafter)
        expectations = Expectations(entries)
        expected = expectations.tokens
        others = Others(fixed, sum(count * self._tokens_of(shape) for shape, count in fixed.items()))
        all_plain = others.nodes == others.count
        batch_size = len(entries) + others.count
        partitions = Partitions(expectations.classes(), others, self.costs, path)
        # 2. Choose the best partition, as far as enough is known.
        unmeasured = self.costs.plain(batch_size) is None
        unmeasured |= all_plain and not self.costs.knows_plain(batch_size)
        best = partitions.plain
        if not unmeasured and drafter.known:
            kept = self._decision.partition.shapes if self._decision is not None else ()
            best = partitions.best(kept, ADVANTAGE)
        # 3. Assign the shapes, and let some entries look if that is affordable.
        self._count += 1
        assign_shapes(entries, expected, best, self._count)
        look = None if unmeasured else self._add_look(entries, expected, best, partitions, others)
        left = ROUNDS_PER_CHOICE if best.shapes else PLAIN_ROUNDS_PER_CHOICE
        left = FIRST_PLAIN_ROUNDS if unmeasured else look.rounds if look is not None else left
        decision = Decision(self._count, best, look, path, power_of_2(batch_size), left)
        self._previous, self._decision = self._decision, decision
        # 4. Report the reason.
        if look is not None:
            reason = AutoReason.PROBING
        elif unmeasured or not drafter.known:
            reason = AutoReason.UNMEASURED
        else:
            reason = AutoReason.PAYS if best.shapes else AutoReason.DOES_NOT_PAY
        shapes = Counter(entry.state.shape for entry in entries if entry.state.shape.drafts)
        self.verdict = AutoVerdict(
            reason,
            dict(shapes),
            len(entries) - sum(shapes.values()),
            batch_size,
            None if unmeasured or not drafter.known else best.rate / partitions.plain.rate,
            None if unmeasured else best.seconds,
        )
        self._log.note(self.verdict)
        return decision

    def _tokens_of(self, shape: DraftShape) -> float:
        """Return the expected tokens of an entry with a fixed shape, whose kind of sampling is not known."""
        if not shape.drafts:
            return 1.0
        tokens = self._drafter.expected_tokens(SamplingKind.GREEDY, shape.topk == 1)
        return tokens[min(shape.depth, len(tokens) - 1)]

    def _add_look(
        self,
        entries: Sequence[EntryBound],
        expected: Sequence[ExpectedTokens],
        best: Partition,
        partitions: Partitions,
        others: Others,
    ) -> Look | None:
        """If a look is affordable, change the shapes of some entries. Return the look."""
        if not self._looks.affordable:
            return None
        options = LookOptions(
            entries, expected, best, partitions, others, self.costs, known=self._drafter.known
        ).all()
        look = self._looks.next(options, self.costs.plain(partitions.batch_size) or 0.0)
        if look is None:
            return None
        for index in options[look.shape].entries:
            if not look.shape.drafts or look.shape in expected[index]:
                entries[index].state.shape = look.shape
                entries[index].state.looks += look.shape.drafts
        return look

    # ---- learn

    def observe(self, step: ExecutedStep) -> float:
        """Learn costs, the speedup over plain rounds and each request's acceptance from an executed round.

        Returns:
            The seconds that the round has saved, compared with plain rounds that yield the same number of
            tokens. 0 if plain rounds would have been faster, or if a request of the round has a fixed tree
            shape.
        """
        saved_s = 0.0 if step.provisional else self._learn_times(step)
        for entry in step.entries:
            if entry.num_nodes > 1 and entry.shape.drafts:
                chain, depth = entry.shape.topk == 1, entry.shape.depth
                if entry.state is None:
                    self._drafter.observe(entry.kind, chain, entry.accepted, depth)
                else:
                    entry.state.acceptance.observe(chain, entry.accepted, depth)
        return saved_s

    def _learn_times(self, step: ExecutedStep) -> float:
        batch_size, costs = len(step.entries), self.costs
        nodes = sum(entry.num_nodes for entry in step.entries)
        drafts = bool(step.requested)
        costs.observe_verify(batch_size, nodes, step.verify_s)
        costs.observe_rest(batch_size, drafts, step.round_s - step.draft_s - step.verify_s)
        if not step.catches_up:
            costs.observe_drafts(step.requested, step.path, step.draft_s)
        plain_s, tokens = costs.plain(batch_size), batch_size + sum(entry.accepted for entry in step.entries)
        # The duration without the prompts that ran between the rounds.
        seconds = max(SHORTEST_S, step.draft_s + step.verify_s + costs.rest(batch_size, drafts))
        if plain_s is None:
            return 0.0
        plain_s += costs.rest(batch_size, False)
        self._account(step, tokens, seconds, plain_s)
        plainly_s = tokens / batch_size * plain_s
        if nodes > batch_size and not step.catches_up:
            ratio = plainly_s / seconds
            self._draft_rate = (
                ratio if self._draft_rate is None else self._draft_rate + 0.1 * (ratio - self._draft_rate)
            )
        fixed = any(entry.state is None and entry.shape.drafts for entry in step.entries)
        return 0.0 if fixed else max(0.0, plainly_s - seconds)

    def _account(self, step: ExecutedStep, tokens: int, seconds: float, plain_s: float) -> None:
        """Charge a look for the time of its round, and end a decision whose round was surprisingly slow."""
        if all(entry.state is None for entry in step.entries):
            return
        self._looks.earn(seconds, plain_s)
        for decision in (self._decision, self._previous):
            if decision is not None and decision.looked(step):
                self._charge(step, decision, tokens)
                return
        decision, bucket = self._decision, power_of_2(len(step.entries))
        if decision is None or decision.look is not None or decision.bucket != bucket:
            return
        if step.requested and not step.catches_up and seconds > SURPRISE * decision.partition.seconds:
            decision.rounds_left = 0

    def _charge(self, step: ExecutedStep, decision: Decision, tokens: int) -> None:
        """Charge a look for one of its rounds.

        The rounds are charged with their estimated times. Other work on the machine may have prolonged them,
        and would have prolonged plain rounds too. A later round of the look may correct the estimates.
        """
        look = decision.look
        assert look is not None
        nodes = sum(entry.num_nodes for entry in step.entries)
        usual_s = self.costs.round(len(step.entries), nodes, step.requested, step.path)
        catch_up_s = 0.0
        if step.catches_up:
            catch_up_s = max(0.0, step.draft_s - self.costs.drafts(step.requested, step.path))
        loss_s = decision.loss_of(usual_s, catch_up_s, tokens)
        self._looks.spend(look.shape, loss_s)
        if look.is_brief and not self._looks.affordable:
            decision.rounds_left = 0

    def wait_cap_s(self, entries: Sequence[EntryBound], batch_size: int) -> float:
        """Return the maximum time in seconds that a round waits for the proposals of its `auto` entries."""
        return wait_cap_s(entries, batch_size, self.costs, known=self._drafter.known)

    @property
    def speedup_estimate(self) -> float | None:
        """Speedup: tokens per second of recent rounds with drafts, divided by those of plain rounds.

        Rounds of the same batch size are compared. None until both a round with drafts and a plain round have
        been measured.
        """
        return self._draft_rate

    @property
    def lost_s(self) -> float:
        """Seconds that looks have lost so far, compared with the best choices."""
        return self._looks.lost_s

    def _end_decision(self) -> None:
        self._decision = self._previous = None
