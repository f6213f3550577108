"""Defines the controller's inputs: the state of a sequence, the bounds of an entry, and executed rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.services.target.policy.acceptance import DrafterAcceptance, SamplingKind, SequenceAcceptance
from outrider.services.target.policy.cost_model import DraftPath
from outrider.shared.spec.tree import NO_DRAFT, DraftShape


class SequenceState:
    """The speculation controller's memory of one sequence.

    Attributes:
        acceptance: Estimates how often drafts of this request are accepted.
        shape: Tree shape of the request's next round.
        decision: Number of the decision that chose `shape`.
        looks: Number of looks, i.e. measurements of other shapes, in which the request took part.
        drafted_len: Number of tokens of the request that the drafter has processed, as far as is known.
    """

    __slots__ = ("acceptance", "decision", "drafted_len", "looks", "shape")

    def __init__(self, drafter: DrafterAcceptance, kind: SamplingKind = SamplingKind.GREEDY) -> None:
        self.acceptance = SequenceAcceptance(drafter, kind)
        self.shape = NO_DRAFT
        self.decision = -1
        self.looks = 0
        self.drafted_len = 0


@dataclass(frozen=True, slots=True)
class EntryBound:
    """Limits on the tree that one `auto` request of the batch may draft in the next round.

    Attributes:
        state: The speculation controller's memory of the request.
        bound: The largest tree shape that the request allows. It may be a chain.
        useful_depth: The greatest useful depth. It depends on the number of tokens that are left to emit.
        chain: The longest chain that the request allows as an alternative to shapes within `bound`.
            `NO_DRAFT` if there is none.
        committed_len: Number of committed tokens of the request, as far as the host knows.
    """

    state: SequenceState
    bound: DraftShape
    useful_depth: int
    chain: DraftShape = NO_DRAFT
    committed_len: int = 0

    @property
    def forms(self) -> tuple[DraftShape, ...]:
        """The largest tree and the longest chain, or the only form that is allowed."""
        return (self.bound, self.chain) if self.chain.drafts else (self.bound,)

    @property
    def lag(self) -> int:
        """Number of tokens that the drafter must process before the request can draft."""
        return max(0, self.committed_len - self.state.drafted_len)


@dataclass(frozen=True, slots=True)
class ExecutedEntry:
    """The result of one request of the batch in an executed round.

    Attributes:
        state: The speculation controller's memory of the request. None if the controller does not choose its
            shape.
        num_nodes: Number of verified tree nodes, including the root.
        shape: Shape of the request's tree. `NO_DRAFT` without a tree.
        accepted: Number of accepted draft tokens.
        kind: Kind of sampling, for requests whose `state` is None.
    """

    state: SequenceState | None
    num_nodes: int
    shape: DraftShape
    accepted: int
    kind: SamplingKind = SamplingKind.GREEDY


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """Measurements of an executed round. Durations are in seconds.

    Attributes:
        entries: The results of all requests of the batch.
        requested: Number of requests that wanted drafts, by requested tree shape.
        draft_s: Duration of drafting, or of the wait for trees from the host. 0 without drafts.
        verify_s: Duration of the verify pass.
        round_s: Time since the end of the previous round, including prompts between the rounds.
        path: Where the trees came from.
        catches_up: True if the drafter also processed earlier tokens of some sequences in this round. The
            time of such drafts does not predict the time of later rounds.
        provisional: True if a piece of this round ran without a CUDA graph that will soon be recorded. Later
            rounds of this kind will take less time, so nothing is learned from the times of this round.
    """

    entries: Sequence[ExecutedEntry]
    requested: Mapping[DraftShape, int]
    draft_s: float
    verify_s: float
    round_s: float
    path: DraftPath = DraftPath.DEVICE
    catches_up: bool = False
    provisional: bool = False
