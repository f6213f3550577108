"""How much to draft: picks each auto row's depth so that the batch's expected tokens per second are highest, 0 nodes included.

A pure function of what it is told (what was executed, what was accepted, how long it took), so it is tested without a model. Rows that
are better off without drafts are probed again after exponentially growing gaps; while everything drafts, a rare plain step keeps the
plain cost honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.cost_model import Acceptance, StepCosts
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FIRST_PROBE_GAP = 8
LAST_PROBE_GAP = 1024
LAST_INHERITED_GAP = 64
"""New requests start from the gap that others have reached, up to this."""
PROBE_DEPTH = 2
FIRST_SHADOW_GAP = 64
LAST_SHADOW_GAP = 4096
ADVANTAGE = 1.02
"""How much faster than plain drafting must look to be chosen."""
WAIT_SHARE = 0.75
P99_MULTIPLE = 2.0
UNMEASURED_WAIT_S = 0.1
ANSWERS_TO_JUDGE = 8
"""The first proposals, cold on both sides, are waited for whatever they seem to be worth."""


class RowState:
    """What the controller remembers of one request."""

    __slots__ = ("acceptance", "probe_gap", "rounds_without")

    def __init__(self, prior: Acceptance, probe_gap: int) -> None:
        self.acceptance = Acceptance(prior)
        self.probe_gap = probe_gap
        self.rounds_without = 0


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
    """Timings of a finished decode step. `wait_s` is how long the step stood still for the proposal; None without a proposal."""

    rows: Sequence[ExecutedRow]
    depth: int
    wait_s: float | None
    verify_s: float
    overhead_s: float


class SpeculationController:
    """Chooses shapes, learns from executed steps. One per engine; engine thread only."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.acceptance = Acceptance()
        self._shadows: dict[int, _Shadow] = {}
        self._draft_rate: float | None = None
        self._probe_gap = FIRST_PROBE_GAP

    def new_row(self) -> RowState:
        """Return the memory of a new request."""
        return RowState(self.acceptance, self._probe_gap)

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
        level, rate = self._best_level(rows, depths, expected, batch_size, other_nodes)
        chosen = [min(level, depth) for depth in depths]
        if level and len(rows) > 1:
            self._prune(rows, chosen, expected, rate, batch_size, other_nodes)
        return [self._with_probe(row, depth, wanted) for row, depth, wanted in zip(rows, depths, chosen, strict=True)]

    def observe(self, step: ExecutedStep) -> None:
        """Learn from a finished step."""
        batch_size = len(step.rows)
        nodes = sum(row.num_nodes for row in step.rows)
        self.costs.observe_verify(batch_size, nodes, step.verify_s)
        self.costs.observe_overhead(step.overhead_s)
        if step.wait_s is not None:
            self.costs.observe_draft(step.depth, step.wait_s)
        if nodes == batch_size:
            self._shadow(batch_size).since_plain = 0
        else:
            self._shadow(batch_size).since_plain += 1
            plain = self.costs.plain_step(batch_size)
            if plain is not None:
                tokens = batch_size + sum(row.accepted for row in step.rows)
                seconds = (step.wait_s or 0.0) + step.verify_s + step.overhead_s
                ratio = tokens / batch_size * (plain + step.overhead_s) / seconds
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
            tokens = row.state.acceptance.expected_tokens(depth)[-1]
            gain = max(gain, tokens * plain_s - self.costs.verify(batch_size, batch_size + row.bound.max_nodes - 1))
        return min(P99_MULTIPLE * (self.costs.answer_p99 or 0.0), WAIT_SHARE * gain)

    @property
    def speedup_estimate(self) -> float | None:
        """Tokens per second of recent drafting steps over those of plain steps of the same batch size; None before both were seen."""
        return self._draft_rate

    def _shadow(self, batch_size: int) -> _Shadow:
        return self._shadows.setdefault(batch_size, _Shadow())

    def _best_level(
        self, rows: Sequence[RowBound], depths: Sequence[int], expected: Sequence[Sequence[float]], batch_size: int, other_nodes: int
    ) -> tuple[int, float]:
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

    def _prune(
        self,
        rows: Sequence[RowBound],
        chosen: list[int],
        expected: Sequence[Sequence[float]],
        rate: float,
        batch_size: int,
        other_nodes: int,
    ) -> None:
        total = other_nodes + sum(_nodes(row.bound, at) for row, at in zip(rows, chosen, strict=True))
        for index, (row, tokens_at) in enumerate(zip(rows, expected, strict=True)):
            extra_nodes = _nodes(row.bound, chosen[index]) - 1
            if extra_nodes <= 0:
                continue
            saved_s = self.costs.verify(batch_size, total) - self.costs.verify(batch_size, total - extra_nodes)
            if tokens_at[chosen[index]] - 1.0 < rate * saved_s:
                chosen[index] = 0
                total -= extra_nodes

    def _with_probe(self, row: RowBound, depth: int, wanted: int) -> DraftShape:
        state = row.state
        if wanted:
            state.probe_gap, state.rounds_without = FIRST_PROBE_GAP, 0
            self._probe_gap = FIRST_PROBE_GAP
            return _shape(row.bound, wanted)
        if not depth:
            return NO_DRAFT
        state.rounds_without += 1
        if state.rounds_without < state.probe_gap:
            return NO_DRAFT
        state.probe_gap, state.rounds_without = min(2 * state.probe_gap, LAST_PROBE_GAP), 0
        self._probe_gap = min(state.probe_gap, LAST_INHERITED_GAP)
        return _shape(row.bound, min(depth, PROBE_DEPTH))


def _nodes(bound: DraftShape, depth: int) -> int:
    """Nodes of a tree cut to `depth` levels: as dense per level as the bound."""
    if depth <= 0:
        return 1
    return 1 + -(-(bound.max_nodes - 1) * depth // bound.depth)


def _shape(bound: DraftShape, depth: int) -> DraftShape:
    return DraftShape(depth, bound.topk, _nodes(bound, depth)).bounded()
