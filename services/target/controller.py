"""How much to draft: picks each auto row's depth so that the batch's expected tokens per second are highest, 0 nodes included.

A pure function of what it is told (what was executed, what was accepted, how long it took), so it is tested without a model. When rows
are better off without drafts, one of them is probed after exponentially growing gaps; while everything drafts, a rare plain step keeps
the plain cost honest; and no step is more than twice as large as any measured before, so that a surprise stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.cost_model import Acceptance, StepCosts
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FIRST_PROBE_GAP = 8
LAST_PROBE_GAP = 1024
SMALL_STEP_ROWS = 32
"""A step of so few rows is tried without having measured half of it."""
PROBE_DEPTH = 2
FIRST_SHADOW_GAP = 64
LAST_SHADOW_GAP = 4096
ADVANTAGE = 1.02
"""How much faster than plain drafting must look to be chosen."""
WAIT_SHARE = 0.75
P99_MULTIPLE = 2.0
UNMEASURED_WAIT_S = 0.1
COMMON_DEPTHS = (1, 2, 3, 5, 8, 12, 16)
"""Depths that batches on the device may have beside the one asked for: each is a graph of its own."""
ROUNDS_PER_CHOICE = 8
"""A batch on the device keeps its depth for so many rounds: changing it drains the device."""
PLAIN_ROUNDS_PER_CHOICE = 4
KEPT_ADVANTAGE = 1.03
"""How much faster another depth must look to change to it."""
ANSWERS_TO_JUDGE = 8
"""The first proposals, cold on both sides, are waited for whatever they seem to be worth."""


class RowState:
    """What the controller remembers of one request."""

    __slots__ = ("acceptance", "probed", "rounds_without")

    def __init__(self, prior: Acceptance) -> None:
        self.acceptance = Acceptance(prior)
        self.rounds_without = 0
        self.probed = False


class _Shadow:
    """When the next plain step of one batch size is due: at once, then after gaps that double."""

    __slots__ = ("gap", "since_plain")

    def __init__(self) -> None:
        self.gap = 0
        self.since_plain = 0

    def due(self) -> bool:
        if self.since_plain < self.gap:
            return False
        self.gap = min(2 * self.gap, LAST_SHADOW_GAP) if self.gap else FIRST_SHADOW_GAP
        self.since_plain = 0
        return True


class _Common:
    """The depth that all rows of one batch size have on the device, and when it is looked at again."""

    __slots__ = ("depth", "probe_gap", "rounds_left", "since_drafted")

    def __init__(self) -> None:
        self.depth = 0
        self.rounds_left = 0
        self.probe_gap = FIRST_PROBE_GAP
        self.since_drafted = 0


@dataclass(frozen=True, slots=True)
class RowBound:
    """One auto row: its memory, the largest shape it allows, and how deep a tree could still be used up."""

    state: RowState
    bound: DraftShape
    useful_depth: int


@dataclass(frozen=True, slots=True)
class ExecutedRow:
    """One row of a finished step: nodes verified, depth offered, drafts accepted. `state` is None for rows without a controller."""

    state: RowState | None
    num_nodes: int
    offered_depth: int
    accepted: int


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """Timings of a finished decode step. `wait_s` is how long the step stood still for the proposal; None without a proposal.

    A round that stayed on the device has `round_s` alone: from the round before to this one, drafting and all.
    """

    rows: Sequence[ExecutedRow]
    depth: int
    wait_s: float | None
    verify_s: float
    overhead_s: float
    round_s: float | None = None


class SpeculationController:
    """Chooses shapes, learns from executed steps. One per engine; engine thread only."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.acceptance = Acceptance()
        self._shadows: dict[int, _Shadow] = {}
        self._commons: dict[int, _Common] = {}
        self._draft_rate: float | None = None
        self._probe_gap = FIRST_PROBE_GAP
        self._since_probe = 0

    def forget_acceptance(self) -> None:
        """Keep what was learnt of costs only: the text of a warm-up is like nobody's."""
        self.acceptance = Acceptance()
        self._draft_rate = None
        self._probe_gap, self._since_probe = FIRST_PROBE_GAP, 0
        self._commons.clear()

    def new_row(self) -> RowState:
        """Return the memory of a new request."""
        return RowState(self.acceptance)

    def choose(self, rows: Sequence[RowBound], batch_size: int, other_nodes: int) -> list[DraftShape]:
        """Pick a shape within each row's bound.

        Args:
            rows: The auto rows of the step.
            batch_size: All decoding sequences of the step.
            other_nodes: Nodes of the rows that are not the controller's (fixed shapes, plain rows).
        """
        if not rows:
            return []
        all_plain_possible = other_nodes == batch_size - len(rows)
        if self.costs.plain_step(batch_size) is None or (all_plain_possible and self._shadow(batch_size).due()):
            return [NO_DRAFT] * len(rows)
        depths = [min(row.bound.depth, row.useful_depth) if row.bound.drafts else 0 for row in rows]
        expected = [row.state.acceptance.expected_tokens(depth) for row, depth in zip(rows, depths, strict=True)]
        chosen = self._best_depths(rows, depths, expected, batch_size, other_nodes)
        self._add_probe(rows, depths, chosen)
        return [_shape(row.bound, depth) if depth else NO_DRAFT for row, depth in zip(rows, chosen, strict=True)]

    def choose_common(self, rows: Sequence[RowBound]) -> DraftShape:
        """Pick one shape for a batch whose rounds stay on the device; all rows have the same bound and the controller.

        The choice stands for some rounds. Plain rounds now and then keep the plain cost honest, and drafting is probed after growing gaps.
        """
        batch_size, bound = len(rows), rows[0].bound
        common = self._commons.setdefault(batch_size, _Common())
        if common.rounds_left == 0:
            common.depth = self._common_depth(rows, common)
            common.rounds_left = ROUNDS_PER_CHOICE if common.depth else PLAIN_ROUNDS_PER_CHOICE
        common.rounds_left -= 1
        depth = min(common.depth, bound.depth)
        return _shape(bound, depth) if depth else NO_DRAFT

    def _common_depth(self, rows: Sequence[RowBound], common: _Common) -> int:
        batch_size, bound = len(rows), rows[0].bound
        costs = self.costs
        if costs.plain_round(batch_size) is None or self._shadow(batch_size).due():
            return 0
        expected = [row.state.acceptance.expected_tokens(bound.depth) for row in rows]

        def rate(depth: int) -> float:
            tokens = sum(tokens_at[depth] for tokens_at in expected)
            return tokens / costs.round(batch_size, batch_size * _nodes(bound, depth), depth)

        allowed = self._largest_step(batch_size)
        known = sorted(depth for depth in {*COMMON_DEPTHS, bound.depth} if depth <= bound.depth)
        depths = [depth for depth in known if batch_size * _nodes(bound, depth) <= allowed] or known[:1]
        best = max(depths, key=rate, default=0)
        if common.depth in depths and rate(best) < KEPT_ADVANTAGE * rate(common.depth):
            best = common.depth
        if best and rate(best) > ADVANTAGE * rate(0):
            common.probe_gap, common.since_drafted = FIRST_PROBE_GAP, 0
            return best
        common.since_drafted += 1
        if depths and common.since_drafted >= common.probe_gap:
            common.since_drafted = 0
            common.probe_gap = min(2 * common.probe_gap, LAST_PROBE_GAP)
            return min(PROBE_DEPTH, max(depths))
        return 0

    def observe(self, step: ExecutedStep) -> None:
        """Learn from a finished step."""
        batch_size = len(step.rows)
        nodes = sum(row.num_nodes for row in step.rows)
        if step.round_s is not None:
            self.costs.observe_round(batch_size, nodes, step.depth, step.round_s)
            plain = self.costs.plain_round(batch_size)
            seconds = step.round_s
            if nodes == batch_size:  # what drafting by way of the host must beat
                self.costs.observe_plain_round(batch_size, step.round_s)
        else:
            self.costs.observe_verify(batch_size, nodes, step.verify_s)
            self.costs.observe_overhead(step.overhead_s)
            if step.wait_s is not None:
                self.costs.observe_draft(step.depth, step.wait_s)
            plain = self.costs.plain_step(batch_size)
            plain = None if plain is None else plain + step.overhead_s
            seconds = (step.wait_s or 0.0) + step.verify_s + step.overhead_s
        if nodes == batch_size:
            self._shadow(batch_size).since_plain = 0
        else:
            self._shadow(batch_size).since_plain += 1
            if plain is not None:
                tokens = batch_size + sum(row.accepted for row in step.rows)
                ratio = tokens / batch_size * plain / seconds
                self._draft_rate = ratio if self._draft_rate is None else self._draft_rate + 0.1 * (ratio - self._draft_rate)
        for row in step.rows:
            if row.num_nodes > 1 and row.offered_depth:
                (row.state.acceptance if row.state else self.acceptance).observe(row.accepted, row.offered_depth)
                if row.state:
                    self.acceptance.observe(row.accepted, row.offered_depth)

    def wait_cap_s(self, rows: Sequence[RowBound], batch_size: int) -> float:
        """Return how long a step may wait for the auto rows' proposals.

        Twice the proposals' 99th percentile, but no more than three quarters of what waiting can win back: a plain step, or, where the
        posterior expects more tokens than one, the plain steps that those tokens would take less the pass that verifies them.
        """
        plain_s = self.costs.plain_step(batch_size)
        if plain_s is None or self.costs.num_answers < ANSWERS_TO_JUDGE:
            return UNMEASURED_WAIT_S
        gain = plain_s
        for row in rows:
            depth = min(row.bound.depth, row.useful_depth)
            # Until acceptance is known, hope for the best: what is never waited for is never learnt.
            acceptance = row.state.acceptance
            tokens = acceptance.expected_tokens(depth)[-1] if acceptance.known else 1.0 + depth
            gain = max(gain, tokens * plain_s - self.costs.verify(batch_size, batch_size + row.bound.max_nodes - 1))
        return min(P99_MULTIPLE * (self.costs.answer_p99 or 0.0), WAIT_SHARE * gain)

    @property
    def speedup_estimate(self) -> float | None:
        """Tokens per second of recent drafting steps over those of plain steps of the same batch size; None before both were seen."""
        return self._draft_rate

    def _shadow(self, batch_size: int) -> _Shadow:
        return self._shadows.setdefault(batch_size, _Shadow())

    def _best_depths(
        self, rows: Sequence[RowBound], depths: list[int], expected: Sequence[Sequence[float]], batch_size: int, other_nodes: int
    ) -> list[int]:
        """Return each row's depth: the best common level, then without the rows that are not worth their nodes, then once more."""
        level, rate = self._best_level(rows, depths, expected, batch_size, other_nodes)
        chosen = [min(level, depth) for depth in depths]
        if not level or len(rows) == 1:
            return chosen
        total = other_nodes + sum(_nodes(row.bound, at) for row, at in zip(rows, chosen, strict=True))
        allowed = self._largest_step(batch_size)
        kept = list(chosen)
        for index, (row, tokens_at) in enumerate(zip(rows, expected, strict=True)):
            extra_nodes = _nodes(row.bound, chosen[index]) - 1
            saved_s = self.costs.verify(batch_size, total) - self.costs.verify(batch_size, total - extra_nodes)
            if total > allowed or tokens_at[chosen[index]] - 1.0 < rate * saved_s:
                kept[index] = 0
                total -= extra_nodes
        if kept == chosen:
            return chosen
        remaining = [depth if keep else 0 for depth, keep in zip(depths, kept, strict=True)]
        level, _rate = self._best_level(rows, remaining, expected, batch_size, other_nodes)
        return [min(level, depth) for depth in remaining]

    def _best_level(
        self, rows: Sequence[RowBound], depths: Sequence[int], expected: Sequence[Sequence[float]], batch_size: int, other_nodes: int
    ) -> tuple[int, float]:
        """Return the common depth with the most expected tokens per second, and those."""
        others = batch_size - len(rows)
        best_level = 0
        plain_rate = best_rate = batch_size / self.costs.step(batch_size, len(rows) + other_nodes, 0)
        for level in range(1, max(depths) + 1):
            nodes = other_nodes
            tokens = float(others)
            for row, depth, tokens_at in zip(rows, depths, expected, strict=True):
                at = min(level, depth)
                nodes += _nodes(row.bound, at)
                tokens += tokens_at[at]
            rate = tokens / self.costs.step(batch_size, nodes, level)
            if rate > best_rate and rate > ADVANTAGE * plain_rate:
                best_level, best_rate = level, rate
        return best_level, best_rate

    def _largest_step(self, batch_size: int) -> int:
        return max(SMALL_STEP_ROWS, 2 * self.costs.most_rows(batch_size))

    def _add_probe(self, rows: Sequence[RowBound], depths: Sequence[int], chosen: list[int]) -> None:
        """Let the row that has gone longest without drafts try again, if it is time."""
        candidates = []
        for index, (row, depth, wanted) in enumerate(zip(rows, depths, chosen, strict=True)):
            state = row.state
            if wanted:
                if state.probed:  # drafting pays again: look at the others soon
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


def _nodes(bound: DraftShape, depth: int) -> int:
    """Nodes of a tree cut to `depth` levels: as dense per level as the bound."""
    if depth <= 0:
        return 1
    return 1 + -(-(bound.max_nodes - 1) * depth // bound.depth)


def _shape(bound: DraftShape, depth: int) -> DraftShape:
    return DraftShape(depth, bound.topk, _nodes(bound, depth)).bounded()
