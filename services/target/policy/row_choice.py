"""What the controller is told of rows and steps, and what it remembers of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.policy.cost_model import Acceptances
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FIRST_LOOK_GAP = 2
LAST_LOOK_GAP = 512
ROUNDS_PER_CHOICE = 8
"""A form is kept for so many rounds; so is the shape of a batch on the device, as changing it drains the device."""


class RowState:
    """What the controller remembers of one request."""

    __slots__ = ("acceptance", "probed", "rounds_without")

    def __init__(self, prior: Acceptances) -> None:
        self.acceptance = Acceptances(prior)
        self.rounds_without = 0
        self.probed = False


@dataclass(frozen=True, slots=True)
class RowBound:
    """One auto row: its memory, the largest shape it allows, how deep a tree could still be used up, and the longest chain it allows.

    `chain` is `NO_DRAFT` where there are none beside `bound`, which may be a chain itself.
    """

    state: RowState
    bound: DraftShape
    useful_depth: int
    chain: DraftShape = NO_DRAFT

    @property
    def forms(self) -> tuple[DraftShape, ...]:
        """The largest tree and the longest chain, or the one there is."""
        return (self.bound, self.chain) if self.chain.drafts else (self.bound,)

    def form(self, chain: bool) -> DraftShape:
        """Return the bound of one form, or the only one."""
        return self.chain if chain and self.chain.drafts else self.bound

    def expected_tokens(self, bound: DraftShape, depth: int) -> list[float]:
        """Return the tokens that a round of depth 0, 1, ..., `depth` of a form is expected to emit; a tree holds a chain."""
        trees, chains = self.state.acceptance.trees, self.state.acceptance.chains
        if bound.topk == 1:
            return chains.expected_tokens(depth)
        tokens = trees.expected_tokens(depth)
        if not chains.tried:
            return tokens
        return [max(pair) for pair in zip(tokens, chains.expected_tokens(depth), strict=True)]


@dataclass(frozen=True, slots=True)
class ExecutedRow:
    """One row of a finished step: nodes verified, depth offered, drafts accepted, and whether a chain was asked for.

    `state` is None for rows without a controller.
    """

    state: RowState | None
    num_nodes: int
    offered_depth: int
    accepted: int
    chain: bool = False


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


class FormChoice:
    """Which form is drafted, trees or chains: the one that promises more tokens per second, and after growing gaps the other."""

    __slots__ = ("_best", "_gap", "_since", "chain")

    def __init__(self) -> None:
        self.chain = False
        self._best = False
        self._gap = FIRST_LOOK_GAP
        self._since = 0

    def decide(self, trees: float | None, chains: float | None) -> bool:
        """Return whether chains are drafted until the next decision.

        Args:
            trees, chains: Tokens per second that each promises; None for a form that was not tried yet: it waits for its turn.
        """
        best = chains is not None and (trees is None or chains > trees)
        if best is not self._best:
            self._best, self._gap = best, FIRST_LOOK_GAP
        self._since += 1
        if self._since > self._gap:
            self._since = 0
            self._gap = min(2 * self._gap, LAST_LOOK_GAP)
            best = not best
        self.chain = best
        return best
