"""The controller's inputs, and its memory of each request. `FormChoice` decides between trees and chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.policy.cost_model import Acceptances
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FIRST_LOOK_GAP = 2
LAST_LOOK_GAP = 512
ROUNDS_PER_CHOICE = 8
"""Number of rounds for which the choice of a form, or of the shape of rounds on the device, is kept.

A remote draft must leave its rounds and enter new ones for each change of shape, so changes must be rare.
"""


class RowState:
    """The controller's memory of one request."""

    __slots__ = ("acceptance", "probed", "rounds_without")

    def __init__(self, prior: Acceptances) -> None:
        self.acceptance = Acceptances(prior)
        self.rounds_without = 0
        self.probed = False


@dataclass(frozen=True, slots=True)
class RowBound:
    """The draft bounds of one `auto` row.

    Attributes:
        state: The controller's memory of the request.
        bound: The largest shape that the request allows, which may be a chain.
        useful_depth: The greatest depth that is useful for the number of tokens that are left to emit.
        chain: The longest chain that is allowed in addition to `bound`; `NO_DRAFT` for none.
    """

    state: RowState
    bound: DraftShape
    useful_depth: int
    chain: DraftShape = NO_DRAFT

    @property
    def forms(self) -> tuple[DraftShape, ...]:
        """The largest tree and the longest chain, or the only form that is allowed."""
        return (self.bound, self.chain) if self.chain.drafts else (self.bound,)

    def form(self, chain: bool) -> DraftShape:
        """Return the bound of one form (tree or chain), or the only bound if the row has one form."""
        return self.chain if chain and self.chain.drafts else self.bound

    def expected_tokens(self, bound: DraftShape, depth: int) -> list[float]:
        """Return the expected tokens of a round in the form of `bound`, for depths 0, 1, ..., `depth`.

        A tree contains a chain, so a tree is expected to yield at least as many tokens as a chain.
        """
        trees, chains = self.state.acceptance.trees, self.state.acceptance.chains
        if bound.topk == 1:
            return chains.expected_tokens(depth)
        tokens = trees.expected_tokens(depth)
        if not chains.tried:
            return tokens
        return [max(pair) for pair in zip(tokens, chains.expected_tokens(depth), strict=True)]


@dataclass(frozen=True, slots=True)
class ExecutedRow:
    """One row of an executed step.

    Attributes:
        state: The controller's memory of the request. None for rows whose shape the controller does not
            choose.
        num_nodes: Number of nodes verified, including the root.
        offered_depth: Depth of the row's proposal.
        accepted: Number of accepted draft tokens.
        chain: Whether a chain was requested.
    """

    state: RowState | None
    num_nodes: int
    offered_depth: int
    accepted: int
    chain: bool = False


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """Measurements of an executed decode step, in seconds.

    Attributes:
        rows: All rows of the batch.
        depth: Depth of the deepest proposal. 0 without a proposal.
        wait_s: Time that the step waited for the proposal. None without a proposal.
        verify_s: Duration of the verify pass.
        overhead_s: Duration of scheduling, committing and delivering.
        round_s: For a round on the device, the time since the end of the previous round, including drafting.
            The other times are not measured in this case. None for a host-driven step.
        provisional: True if later steps of this kind will take less time, because a piece without a CUDA
            graph will soon be recorded. Nothing is learned from the times of such a step.
    """

    rows: Sequence[ExecutedRow]
    depth: int
    wait_s: float | None
    verify_s: float
    overhead_s: float
    round_s: float | None = None
    provisional: bool = False


class FormChoice:
    """Chooses between drafting trees and drafting chains.

    The form with more expected tokens per second is used. The other form is tried after gaps that double,
    because its estimate would otherwise become outdated.
    """

    __slots__ = ("_best", "_gap", "_since", "chain")

    def __init__(self) -> None:
        self.chain = False
        self._best = False
        self._gap = FIRST_LOOK_GAP
        self._since = 0

    def decide(self, trees: float | None, chains: float | None) -> bool:
        """Return True if rows draft chains until the next decision.

        Args:
            trees, chains: Expected tokens per second of trees and of chains. None for a form that was not
                tried yet, which is used only when its next trial is due.
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
