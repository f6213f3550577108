"""A decision of the controller: the shapes of the `auto` entries in the next rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.policy.controller_inputs import EntryBound, ExecutedStep
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.policy.expectations import ExpectedTokens
from outrider.services.target.policy.looks import Look
from outrider.services.target.policy.partition import Partition
from outrider.shared.spec.tree import NO_DRAFT


@dataclass(slots=True)
class Decision:
    """A decision of the speculation controller: the tree shapes of the `auto` requests for the next rounds.

    Attributes:
        number: Identifies the decision.
        partition: The best division of the requests among tree shapes. It applies to all requests that take
            no part in the look.
        look: A few rounds that only measure another tree shape. None without a look.
        path: Where the trees come from.
        bucket: The batch size, rounded up to a power of 2.
        rounds_left: Number of further rounds for which the decision is kept.
        looked_rounds: Number of executed rounds of the look.
        looked_s: Seconds that the look has lost in the rounds that were passed to `loss_of`.
        catch_up_s: Seconds in which the drafter processed earlier tokens in these rounds.
        tokens: Number of tokens of these rounds.
    """

    number: int
    partition: Partition
    look: Look | None
    path: DraftPath
    bucket: int
    rounds_left: int
    looked_rounds: int = 0
    looked_s: float = 0.0
    catch_up_s: float = 0.0
    tokens: int = 0

    def loss_of(self, usual_s: float, catch_up_s: float, tokens: int) -> float:
        """Record a round of the decision's look. Return the seconds lost since the previous call.

        A look consists of rounds that only measure another tree shape.

        Args:
            usual_s: Estimated seconds of a round of the look. The estimate also replaces the times of the
                look's earlier rounds, because the first rounds of a shape may be unusually slow.
            catch_up_s: Seconds in which the drafter processed earlier tokens in this round.
            tokens: Number of tokens of this round.
        """
        self.looked_rounds += 1
        self.catch_up_s += catch_up_s
        self.tokens += tokens
        before_s = self.looked_s
        self.looked_s = self.looked_rounds * usual_s + self.catch_up_s - self.tokens / self.partition.rate
        return self.looked_s - before_s

    def looked(self, step: ExecutedStep) -> bool:
        """Return True if a round was part of this decision's look."""
        if self.look is None:
            return False
        shape = self.look.shape
        drafted = {entry.shape for entry in step.entries if entry.state is not None and entry.shape.drafts}
        if not shape.drafts:
            return not drafted
        return any(
            one not in self.partition.shapes and (one.topk == 1) is (shape.topk == 1) for one in drafted
        )


def assign_shapes(
    entries: Sequence[EntryBound], expected: Sequence[ExpectedTokens], partition: Partition, number: int
) -> None:
    """Assign a tree shape to each `auto` request of a round. The number of requests per shape is limited.

    Args:
        entries: The `auto` requests of the round.
        expected: The expected tokens of each request, by shape.
        partition: Determines the shapes, and the largest number of requests for each shape (`counts`).
        number: Number of the decision.
    """
    left = dict(partition.counts)
    gains = [partition.gain_for(tokens) for tokens in expected]
    for index in sorted(range(len(entries)), key=lambda index: (-gains[index], entries[index].lag)):
        shape = partition.shape_for(expected[index])
        if shape.drafts and not left.get(shape):
            shape = NO_DRAFT
        elif shape.drafts:
            left[shape] -= 1
        entries[index].state.shape = shape
        entries[index].state.decision = number
