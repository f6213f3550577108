"""Chooses one draft shape for all `auto` rows of equal bounds in a round that is drafted on the device.

Objective: the most expected tokens per second of the batch,

    tokens of one round, summed over all rows  /  seconds of the round (`StepCosts.round`)

Expected tokens come from each row's acceptance (`RowBound.expected_tokens`). The candidates are the shapes of
`offered_shapes`, each with its own CUDA graph, and plain decoding (`NO_DRAFT`).

Estimates are noisy, and each change of shape needs other graphs and ends the rounds of a remote draft. So
the choice is stable:

- A drafting shape is chosen only if its estimated rate is above `ADVANTAGE` times the rate of plain decoding.
  The shape is then kept for `ROUNDS_PER_CHOICE` rounds.
- Another shape of the same form (tree or chain) replaces the current shape only if its estimated rate is at
  least `KEPT_ADVANTAGE` times the current shape's rate.

Probes refresh the estimates. While plain decoding is best, a probe is a small draft. While drafting is best,
a probe is a plain round. The gap before the next probe doubles after each probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.services.target.policy.cost_model import Acceptances, StepCosts
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.policy.row_choice import ROUNDS_PER_CHOICE, FormChoice, RowBound
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FIRST_PROBE_GAP = 8
LAST_PROBE_GAP = 1024
PROBE_DEPTH = 2
FIRST_SHADOW_GAP = 64
LAST_SHADOW_GAP = 4096
ADVANTAGE = 1.02
"""Minimum expected rate of a drafting shape, as a multiple of the rate of plain decoding."""
KEPT_ADVANTAGE = 1.03
"""Minimum expected rate of a replacement, as a multiple of the rate of the current shape."""
SMALL_STEP_ROWS = 32
"""Steps of up to this number of rows may be tried even if no step of half the size has been measured."""
PLAIN_ROUNDS_PER_CHOICE = 4
MOST_SPEAKERS = 16
"""Maximum number of rows in the sample from which the expected tokens of a batch are estimated."""

Rate = Callable[[DraftShape], float]
"""Returns the expected tokens per second of a shape."""


class PlainProbe:
    """Schedule of the plain steps that measure the plain cost at one batch size.

    The first plain step is due immediately. Each later plain step is due after a gap of drafting steps, and
    the gap doubles every time.
    """

    __slots__ = ("gap", "since_plain")

    def __init__(self) -> None:
        self.gap = 0
        self.since_plain = 0

    def due(self) -> bool:
        """Return True if a plain step is due, and schedule the next one."""
        if self.since_plain < self.gap:
            return False
        self.gap = min(2 * self.gap, LAST_SHADOW_GAP) if self.gap else FIRST_SHADOW_GAP
        self.since_plain = 0
        return True

    def executed(self, plain: bool) -> None:
        """Count an executed step."""
        self.since_plain = 0 if plain else self.since_plain + 1


@dataclass(frozen=True, slots=True)
class Company:
    """The rows of a round whose shapes are not chosen here.

    Attributes:
        rows: Number of these rows.
        nodes: Number of their nodes, roots included.
    """

    rows: int
    nodes: int


class BatchChoice:
    """The current shape of one batch bucket, and the number of rounds for which this shape is kept."""

    __slots__ = ("_form", "_probe_chains", "_probe_gap", "_rounds_left", "_shape", "_since_drafted", "shadow")

    def __init__(self) -> None:
        self.shadow = PlainProbe()
        self._form = FormChoice()
        self._shape = NO_DRAFT
        self._rounds_left = 0
        self._probe_gap = FIRST_PROBE_GAP
        self._probe_chains = False
        self._since_drafted = 0

    def choose(
        self,
        rows: Sequence[RowBound],
        costs: StepCosts,
        acceptance: Acceptances,
        company: Company | None = None,
    ) -> DraftShape:
        """Return the shape of the next round.

        Args:
            rows: The `auto` rows to choose for. All rows have the same forms.
            costs: The measured costs.
            acceptance: The acceptance over all requests.
            company: The other rows of the round. None if there are none.
        """
        offered = offered_shapes(rows[0].forms, len(rows))
        if self._rounds_left == 0 or (self._shape.drafts and self._shape not in offered):
            self._shape = self._next(rows, offered, costs, acceptance, company or Company(0, 0))
            self._rounds_left = ROUNDS_PER_CHOICE if self._shape.drafts else PLAIN_ROUNDS_PER_CHOICE
        self._rounds_left -= 1
        return self._shape

    def _next(
        self,
        rows: Sequence[RowBound],
        offered: Sequence[DraftShape],
        costs: StepCosts,
        acceptance: Acceptances,
        company: Company,
    ) -> DraftShape:
        batch_size = len(rows) + company.rows
        # 1. Measure a plain round first, and again when a plain step is due.
        alone = company.nodes == company.rows
        if not offered or costs.plain_round(batch_size) is None or (alone and self.shadow.due()):
            return NO_DRAFT
        deepest = {form.topk == 1: form for form in rows[0].forms}
        expected = {chain: _summed(rows, form) for chain, form in deepest.items()}

        def rate(shape: DraftShape) -> float:
            tokens = expected[shape.topk == 1][shape.depth] if shape.drafts else len(rows)
            nodes = len(rows) * shape.max_nodes + company.nodes
            return (tokens + company.rows) / costs.round(batch_size, nodes, shape.depth)

        # 2. Use the shape with the highest rate if that rate beats plain decoding.
        allowed = _allowed(offered, costs.most_rows(batch_size), len(rows))
        best = self._best(allowed, rate, acceptance)
        if rate(best) > ADVANTAGE * rate(NO_DRAFT):
            self._probe_gap, self._since_drafted = FIRST_PROBE_GAP, 0
            return best
        # 3. Otherwise decode plainly. After gaps that grow, probe a small tree or a small chain in turn.
        self._since_drafted += 1
        if self._since_drafted < self._probe_gap:
            return NO_DRAFT
        self._since_drafted = 0
        self._probe_gap = min(2 * self._probe_gap, LAST_PROBE_GAP)
        self._probe_chains = not self._probe_chains
        return _probe(allowed, self._probe_chains)

    def _best(self, allowed: Sequence[DraftShape], rate: Rate, acceptance: Acceptances) -> DraftShape:
        """Return the best shape of the form that `FormChoice` selects. The current shape wins near-ties."""
        best: dict[bool, DraftShape] = {}
        for chain in (False, True):
            shapes = [shape for shape in allowed if (shape.topk == 1) is chain]
            if shapes:
                found = max(shapes, key=rate)
                kept = self._shape in shapes and rate(found) < KEPT_ADVANTAGE * rate(self._shape)
                best[chain] = self._shape if kept else found
        if len(best) == 1:
            return next(iter(best.values()))
        promised = [rate(shape) if acceptance.of(chain).tried else None for chain, shape in best.items()]
        return best[self._form.decide(*promised)]


def _summed(rows: Sequence[RowBound], form: DraftShape) -> list[float]:
    """Return the expected tokens of a round, summed over all rows, for depths 0, 1, ..., `form.depth`.

    Large batches are estimated from a sample of rows.
    """
    speakers = rows[:: -(-len(rows) // MOST_SPEAKERS)]
    share = len(rows) / len(speakers)
    return [
        share * sum(tokens)
        for tokens in zip(*(row.expected_tokens(form, form.depth) for row in speakers), strict=True)
    ]


def _allowed(offered: Sequence[DraftShape], most_rows: int, batch_size: int) -> list[DraftShape]:
    """Return the shapes that may be tried.

    A shape may need at most twice the rows of the largest measured step. The smallest shape of each form is
    always allowed.
    """
    largest = max(SMALL_STEP_ROWS, 2 * most_rows)
    smallest = {
        chain: min((one for one in offered if (one.topk == 1) is chain), key=_nodes, default=None)
        for chain in (False, True)
    }
    return [
        shape for shape in offered if batch_size * shape.max_nodes <= largest or shape in smallest.values()
    ]


def _probe(allowed: Sequence[DraftShape], chains: bool) -> DraftShape:
    """Return a small shape of the requested form or, if that form is not offered, of the other form."""
    shapes = [shape for shape in allowed if (shape.topk == 1) is chains] or allowed
    return max(
        (shape for shape in shapes if shape.depth <= PROBE_DEPTH), key=_nodes, default=min(shapes, key=_nodes)
    )


def _nodes(shape: DraftShape) -> int:
    return shape.max_nodes
