"""Chooses how many tokens each `auto` request drafts in the next round, from none to the largest shape.

Objective: the most expected tokens per second of the whole batch,

    sum of expected tokens over all rows
    ------------------------------------------------------------------------------------
    wait for the proposal (depth)  +  verify pass (batch size, total nodes)  +  overhead

Numerator and denominator are estimated from executed steps (`observe`). `Acceptances` in `cost_model`
estimates the expected tokens from the numbers of accepted drafts. `StepCosts` in `cost_model` estimates the
seconds from measured times. The controller runs no model, so it is tested against synthetic machines.

The choice depends on where the trees of a round come from:

- From the host: `choose` picks the best common depth and cuts it to each row's bound. A row drafts nothing if
  its nodes cost more time than its expected tokens save.
- From a drafter on the device: `choose_common` picks one shape for all rows with equal bounds
  (`batch_choice`). Each shape of a round is a draft piece of its own, so few shapes are best.

Estimates become outdated, so the controller also explores:

- Probe: while drafting does not pay, one row drafts occasionally. The gap doubles after each probe.
- Plain step: while rows draft, a rare plain step measures the plain cost again.
- Form: trees and chains are compared regularly. The worse form is tried occasionally, and the gap doubles
  after each trial (`FormChoice`).
- Growth: a step has at most twice the rows of the largest measured step. Rows above this limit get no drafts,
  so that an unexpectedly slow step stays short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.policy.batch_choice import (
    ADVANTAGE,
    FIRST_PROBE_GAP,
    LAST_PROBE_GAP,
    PROBE_DEPTH,
    SMALL_STEP_ROWS,
    BatchChoice,
    Company,
    PlainProbe,
)
from outrider.services.target.policy.cost_model import Acceptances, StepCosts
from outrider.services.target.policy.offered_shapes import cut, nodes_of
from outrider.services.target.policy.row_choice import (
    ROUNDS_PER_CHOICE,
    ExecutedRow,
    ExecutedStep,
    FormChoice,
    RowBound,
    RowState,
)
from outrider.shared.engine.buckets import power_of_2
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

__all__ = ["ExecutedRow", "ExecutedStep", "RowBound", "RowState", "SpeculationController"]

WAIT_SHARE = 0.75
"""Maximum wait for proposals, as a share of the time that the proposals can save."""
P99_MULTIPLE = 2.0
"""Maximum wait for proposals, as a multiple of the 99th percentile of measured proposal times."""
UNMEASURED_WAIT_S = 0.1
"""Maximum wait in seconds while fewer than `ANSWERS_TO_JUDGE` proposals have been measured."""
ANSWERS_TO_JUDGE = 8
"""Number of proposals that are measured before the measured times limit the wait.

The first proposals are slow because caches and buffers of target and draft are cold.
"""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Best depths of the `auto` rows for one form.

    Attributes:
        bounds: The largest shape of each row in this form.
        depths: The chosen depth of each row. 0 stands for no drafts.
        useful: The greatest depth that is useful for each row.
        rate: Expected tokens per second of the batch.
    """

    bounds: list[DraftShape]
    depths: list[int]
    useful: list[int]
    rate: float


class SpeculationController:
    """Chooses draft shapes and learns from executed steps. One instance per engine. Engine thread only."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.acceptance = Acceptances()
        self._shadows: dict[int, PlainProbe] = {}
        self._commons: dict[tuple[int, tuple[DraftShape, ...]], BatchChoice] = {}
        # The choices that the last `choose_common` has used.
        self._used: list[BatchChoice] = []
        self._draft_rate: float | None = None
        self._probe_gap = FIRST_PROBE_GAP
        self._since_probe = 0
        self._form = FormChoice()
        self._form_left = 0

    def forget_acceptance(self) -> None:
        """Discard learned acceptance but keep learned costs, because warm-up text is unlike real requests."""
        self.acceptance = Acceptances()
        self._draft_rate = None
        self._probe_gap, self._since_probe = FIRST_PROBE_GAP, 0
        self._form, self._form_left = FormChoice(), 0
        self._commons.clear()
        self._used.clear()

    def new_row(self) -> RowState:
        """Return the state of a new request. Its prior is the acceptance of all requests."""
        return RowState(self.acceptance)

    def choose(self, rows: Sequence[RowBound], batch_size: int, other_nodes: int) -> list[DraftShape]:
        """Choose a shape for each row, within the row's bound.

        Args:
            rows: The `auto` rows of the step.
            batch_size: Number of decoding sequences of the step, including those that are not `auto`.
            other_nodes: Number of nodes of the rows that are not `auto`, i.e. of fixed shapes and plain rows.
        """
        if not rows:
            return []
        # A plain step measures the plain cost. This is possible only if the rows that are not `auto` are
        # plain, too.
        all_plain_possible = other_nodes == batch_size - len(rows)
        if self.costs.plain_step(batch_size) is None or (
            all_plain_possible and self._shadow(batch_size).due()
        ):
            return [NO_DRAFT] * len(rows)
        plan = self._plan(rows, batch_size, other_nodes)
        self._add_probe(rows, plan.useful, plan.depths)
        return [
            cut(bound, depth) if depth else NO_DRAFT
            for bound, depth in zip(plan.bounds, plan.depths, strict=True)
        ]

    def choose_common(
        self, rows: Sequence[RowBound], batch_size: int = 0, other_nodes: int = 0
    ) -> list[DraftShape]:
        """Choose shapes for rounds on the device: one shape for all rows with the same forms.

        A choice is kept for several rounds. See `batch_choice`.

        Args:
            rows: The `auto` rows of the round.
            batch_size: Number of sequences of the round, including those that are not `auto`. By default,
                there are no other sequences.
            other_nodes: Number of nodes of the rows that are not `auto`.
        """
        batch_size = max(batch_size, len(rows))
        groups: dict[tuple[DraftShape, ...], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.forms, []).append(index)
        shapes, self._used = [NO_DRAFT] * len(rows), []
        for forms, members in groups.items():
            # Rows of other groups count as plain rows.
            others = batch_size - len(rows), other_nodes
            company = Company(others[0] + len(rows) - len(members), others[1] + len(rows) - len(members))
            choice = self._common(len(members), forms)
            self._used.append(choice)
            shape = choice.choose([rows[index] for index in members], self.costs, self.acceptance, company)
            for index in members:
                shapes[index] = shape
        return shapes

    def observe(self, step: ExecutedStep) -> None:
        """Learn the costs, the speedup over plain steps and each row's acceptance from an executed step."""
        batch_size = len(step.rows)
        nodes = sum(row.num_nodes for row in step.rows)
        if step.round_s is not None:
            self.costs.observe_round(batch_size, nodes, step.depth, step.round_s)
            plain = self.costs.plain_round(batch_size)
            seconds = step.round_s
            if nodes == batch_size:
                # Drafting through the host must also beat this plain round.
                self.costs.observe_plain_round(batch_size, step.round_s)
        else:
            self.costs.observe_verify(batch_size, nodes, step.verify_s)
            self.costs.observe_overhead(step.overhead_s)
            if step.wait_s is not None:
                self.costs.observe_draft(step.depth, step.wait_s, any(row.chain for row in step.rows))
            plain = self.costs.plain_step(batch_size)
            plain = None if plain is None else plain + step.overhead_s
            seconds = (step.wait_s or 0.0) + step.verify_s + step.overhead_s
        plainly = nodes == batch_size
        if step.round_s is None:
            self._shadow(batch_size).executed(plainly)
        else:
            # A round may be chosen before the previous round is observed. The same choices are in use then,
            # unless the batch has just changed.
            for choice in self._used:
                choice.shadow.executed(plainly)
        if nodes > batch_size and plain is not None:
            tokens = batch_size + sum(row.accepted for row in step.rows)
            ratio = tokens / batch_size * plain / seconds
            self._draft_rate = (
                ratio if self._draft_rate is None else self._draft_rate + 0.1 * (ratio - self._draft_rate)
            )
        for row in step.rows:
            if row.num_nodes > 1 and row.offered_depth:
                self.acceptance.of(row.chain).observe(row.accepted, row.offered_depth)
                if row.state:
                    row.state.acceptance.of(row.chain).observe(row.accepted, row.offered_depth)

    def estimated_s(self, batch_size: int, nodes: int, depth: int, *, on_device: bool) -> float | None:
        """Return the estimated seconds of a round, or None before any plain round was measured.

        Args:
            batch_size: Number of sequences of the round.
            nodes: Number of nodes of the round.
            depth: Depth of the deepest tree; 0 without trees.
            on_device: True if the round is drafted on the device.
        """
        costs = self.costs
        if costs.plain_step(batch_size) is None and costs.plain_round(batch_size) is None:
            return None
        return (costs.round if on_device else costs.step)(batch_size, nodes, depth)

    def wait_cap_s(self, rows: Sequence[RowBound], batch_size: int) -> float:
        """Return the maximum time in seconds that a step waits for the proposals of its `auto` rows.

        The limit is the smaller of two values:

        - `P99_MULTIPLE` times the 99th percentile of the measured proposal times;
        - `WAIT_SHARE` of the time that the proposal can save. A proposal of n expected tokens saves the time
          of n plain steps, but costs the time of its verify pass. The assumed saving is at least one plain
          step.
        """
        plain_s = self.costs.plain_step(batch_size)
        if plain_s is None or self.costs.num_answers < ANSWERS_TO_JUDGE:
            return UNMEASURED_WAIT_S
        gain = plain_s
        for row in rows:
            for bound in row.forms:
                depth = min(bound.depth, row.useful_depth)
                # While acceptance is unknown, assume that all nodes are accepted. Otherwise the step might
                # not wait, and acceptance would never be measured.
                known = row.state.acceptance.of(bound.topk == 1).known
                tokens = row.expected_tokens(bound, depth)[-1] if known else 1.0 + depth
                gain = max(
                    gain, tokens * plain_s - self.costs.verify(batch_size, batch_size + bound.max_nodes - 1)
                )
        return min(P99_MULTIPLE * (self.costs.answer_p99 or 0.0), WAIT_SHARE * gain)

    @property
    def speedup_estimate(self) -> float | None:
        """Tokens per second of recent drafting steps, relative to plain steps of the same batch size.

        None until a drafting step and a plain step were measured.
        """
        return self._draft_rate

    def _shadow(self, batch_size: int) -> PlainProbe:
        return self._shadows.setdefault(batch_size, PlainProbe())

    def _common(self, rows: int, forms: tuple[DraftShape, ...]) -> BatchChoice:
        """Return the `BatchChoice` that similar numbers of rows with the same forms share."""
        return self._commons.setdefault((power_of_2(rows), forms), BatchChoice())

    def _plan(self, rows: Sequence[RowBound], batch_size: int, other_nodes: int) -> _Plan:
        """Return the best plan of the form that `FormChoice` selects for several rounds."""
        if all(len(row.forms) == 1 for row in rows):
            return self._best_plan(rows, False, batch_size, other_nodes)
        if self._form_left:
            self._form_left -= 1
            return self._best_plan(rows, self._form.chain, batch_size, other_nodes)
        self._form_left = ROUNDS_PER_CHOICE - 1
        plans = [self._best_plan(rows, chain, batch_size, other_nodes) for chain in (False, True)]
        promised = [
            plan.rate if self.acceptance.of(chain).tried else None
            for chain, plan in zip((False, True), plans, strict=True)
        ]
        return plans[self._form.decide(*promised)]

    def _best_plan(self, rows: Sequence[RowBound], chain: bool, batch_size: int, other_nodes: int) -> _Plan:
        """Return the best depths of the rows for one form."""
        # 1. Find the best common depth. A row with a lower bound uses its bound.
        bounds = [row.form(chain) for row in rows]
        depths = [
            min(bound.depth, row.useful_depth) if bound.drafts else 0
            for row, bound in zip(rows, bounds, strict=True)
        ]
        expected = [
            row.expected_tokens(bound, depth) for row, bound, depth in zip(rows, bounds, depths, strict=True)
        ]
        level, rate = self._best_level(bounds, depths, expected, batch_size, other_nodes)
        chosen = [min(level, depth) for depth in depths]
        if not level or len(rows) == 1:
            return _Plan(bounds, chosen, depths, rate)
        # 2. Drop rows whose nodes cost more time than their tokens save, and rows above the size limit.
        total = other_nodes + sum(nodes_of(bound, at) for bound, at in zip(bounds, chosen, strict=True))
        allowed = max(SMALL_STEP_ROWS, 2 * self.costs.most_rows(batch_size))
        kept = list(chosen)
        for index, (bound, tokens_at) in enumerate(zip(bounds, expected, strict=True)):
            extra_nodes = nodes_of(bound, chosen[index]) - 1
            saved_s = self.costs.verify(batch_size, total) - self.costs.verify(
                batch_size, total - extra_nodes
            )
            if total > allowed or tokens_at[chosen[index]] - 1.0 < rate * saved_s:
                kept[index] = 0
                total -= extra_nodes
        # 3. Find the best common depth again, because it may change without the dropped rows.
        if kept == chosen:
            return _Plan(bounds, chosen, depths, rate)
        remaining = [depth if keep else 0 for depth, keep in zip(depths, kept, strict=True)]
        level, rate = self._best_level(bounds, remaining, expected, batch_size, other_nodes)
        return _Plan(bounds, [min(level, depth) for depth in remaining], depths, rate)

    def _best_level(
        self,
        bounds: Sequence[DraftShape],
        depths: Sequence[int],
        expected: Sequence[Sequence[float]],
        batch_size: int,
        other_nodes: int,
    ) -> tuple[int, float]:
        """Return the common depth with the highest expected rate, and that rate in tokens per second."""
        others = batch_size - len(bounds)
        chain = all(bound.topk == 1 for bound in bounds)
        best_level = 0
        plain_rate = best_rate = batch_size / self.costs.step(batch_size, len(bounds) + other_nodes, 0)
        for level in range(1, max(depths) + 1):
            nodes = other_nodes
            tokens = float(others)
            for bound, depth, tokens_at in zip(bounds, depths, expected, strict=True):
                at = min(level, depth)
                nodes += nodes_of(bound, at)
                tokens += tokens_at[at]
            rate = tokens / self.costs.step(batch_size, nodes, level, chain)
            if rate > best_rate and rate > ADVANTAGE * plain_rate:
                best_level, best_rate = level, rate
        return best_level, best_rate

    def _add_probe(self, rows: Sequence[RowBound], depths: Sequence[int], chosen: list[int]) -> None:
        """If a probe is due, choose a small depth for the row that has had no drafts for the longest time."""
        candidates = []
        for index, (row, depth, wanted) in enumerate(zip(rows, depths, chosen, strict=True)):
            state = row.state
            if wanted:
                if state.probed:  # a probe has made this row draft by choice, so probe the other rows soon
                    self._probe_gap = FIRST_PROBE_GAP
                state.probed = False
                state.rounds_without = 0
            elif depth:
                state.rounds_without += 1
                candidates.append(index)
        if not candidates:
            return
        self._since_probe += 1
        if self._since_probe >= self._probe_gap:
            self._since_probe = 0
            self._probe_gap = min(2 * self._probe_gap, LAST_PROBE_GAP)
            index = max(candidates, key=lambda candidate: rows[candidate].state.rounds_without)
            state = rows[index].state
            state.probed, state.rounds_without = True, 0
            chosen[index] = min(depths[index], PROBE_DEPTH)
