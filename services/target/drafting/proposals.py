"""Requests trees from the drafter: chooses tree shapes, announces, collects trees, counts fallbacks."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.policy.controller import RowBound, SpeculationController
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.spec.drafter import Drafter, ProposalRequest, ProposalRow
from outrider.shared.spec.tree import NO_DRAFT, DraftBatch, DraftShape
from outrider.shared.spec.trees import root_trees, scatter_trees

HOST = torch.device("cpu")
"""Single-node trees are made on the host: they are uploaded with the other inputs of a pass."""

ANSWERED = ("", "empty_tree")
"""Fallback reasons that still count as an answer: the drafter answered, though with the root alone."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An announced request.

    Attributes:
        request: The request as sent.
        rows: Index in the batch of each row of the request.
        depth: Depth of the deepest tree.
        announced_at: `time.monotonic()` of the announcement.
    """

    request: ProposalRequest
    rows: list[int]
    depth: int
    announced_at: float

    @property
    def chains(self) -> set[int]:
        """Batch indices of the rows that asked for chains."""
        return {place for place, row in zip(self.rows, self.request.rows, strict=True) if row.shape.topk == 1}

    def among(self, decodes: Seq[Sequence]) -> Proposal | None:
        """Return the part of the proposal that applies to a slightly different batch; None if no row does."""
        places = {sequence.session_id: index for index, sequence in enumerate(decodes)}
        found = [places.get(row.fence.session_id) for row in self.request.rows]
        rows = [place for place in found if place is not None]
        if len(rows) == len(found):
            return self if rows == self.rows else replace(self, rows=rows)
        kept = [row for row, place in zip(self.request.rows, found, strict=True) if place is not None]
        return replace(self, request=replace(self.request, rows=kept), rows=rows) if kept else None


class Proposals:
    """Chooses how much each sequence drafts, asks the drafter, and counts fallbacks. Engine thread only.

    Attributes:
        most_on_device: Largest batch whose rounds may stay on the device.
    """

    def __init__(
        self,
        drafter: Drafter,
        follower: DraftSessions,
        controller: SpeculationController,
        metrics: TargetMetrics,
    ) -> None:
        self._drafter = drafter
        self._follower = follower
        self._controller = controller
        self._metrics = metrics

        self._chosen: tuple[list[int], list[DraftShape]] = ([], [])
        self.most_on_device = 0

    def announce(self, decodes: Seq[Sequence], round_number: int) -> Proposal | None:
        """Choose every row's tree shape and announce the rows that can have drafts, if there are any."""
        shapes = self._shapes(decodes)
        rows = [index for index, shape in enumerate(shapes) if shape.drafts]
        if not rows:
            return None
        auto_rows = [
            self._bound(decodes[index]) for index in rows if decodes[index].controller_row is not None
        ]
        request = ProposalRequest(
            round=round_number,
            rows=[
                ProposalRow(
                    decodes[i].fence(),
                    decodes[i].tokens[-1],
                    shapes[i],
                    must_wait=decodes[i].controller_row is None,
                )
                for i in rows
            ],
            deadline_s=self._controller.wait_cap_s(auto_rows, len(decodes)) if auto_rows else None,
        )
        announced_at = time.monotonic()
        self._drafter.announce(request)
        return Proposal(request, rows, max(shapes[index].depth for index in rows), announced_at)

    def collect(self, proposal: Proposal | None, decodes: Seq[Sequence]) -> DraftBatch:
        """Return one tree per sequence: the drafter's, or the root alone."""
        roots = [sequence.tokens[-1] for sequence in decodes]
        if proposal is None:
            return root_trees(roots, HOST)
        drafts = self._drafter.propose(proposal.request)
        num_nodes = drafts.num_nodes.tolist()
        for index, nodes in zip(proposal.rows, num_nodes, strict=True):
            if nodes == 1:
                reason = self._drafter.fallback_reason(decodes[index].session_id) or "no_proposal"
                decodes[index].stats.fell_back(reason)
                self._metrics.fell_back(reason)
        if max(num_nodes) == 1:
            return root_trees(roots, HOST)
        return scatter_trees([(drafts, proposal.rows)], roots)

    def timed(
        self, proposal: Proposal | None, decodes: Seq[Sequence], drafts: DraftBatch, wait_s: float
    ) -> Proposal | None:
        """Return the proposal if the wait for it measures the cost of a proposal, else None.

        It does not if the drafter still owes the answer and the wait ended before the deadline.

        Args:
            proposal: The proposal just collected, before anything else is announced.
            decodes: The batch.
            drafts: The result of `collect`.
            wait_s: How long the batch waited for the proposal.
        """
        if proposal is None or drafts.tokens.shape[1] > 1:
            return proposal
        if proposal.request.deadline_s is not None and wait_s >= proposal.request.deadline_s:
            return proposal
        answered = any(
            self._drafter.fallback_reason(decodes[place].session_id) in ANSWERED for place in proposal.rows
        )
        return proposal if answered else None

    def common_shape(self, decodes: Seq[Sequence]) -> DraftShape | None:
        """Return the one tree shape with which all these sequences can stay on the device, or None.

        `NO_DRAFT` stands for plain decoding. Like `announce`, this counts the fallbacks.
        """
        if any(sequence.request.speculation.trace for sequence in decodes):
            return None
        wanting = [sequence for sequence in decodes if sequence.wants_drafts]
        obstacles = [self._follower.obstacle(sequence) for sequence in wanting]
        if all(obstacles):
            for sequence, reason in zip(wanting, obstacles, strict=True):
                sequence.stats.fell_back(reason)
                self._metrics.fell_back(reason)
            return NO_DRAFT
        if not self._drafter.device_resident:
            return self._plain_by_choice(decodes, wanting)
        forms = {sequence.request.speculation.forms for sequence in wanting}
        if any(obstacles) or len(wanting) < len(decodes) or len(forms) > 1:
            return None
        auto = [sequence for sequence in wanting if sequence.controller_row is not None]
        if not auto:
            return forms.pop()[0]
        return (
            self._controller.choose_common([self._bound(sequence) for sequence in auto])
            if len(auto) == len(decodes)
            else None
        )

    def may_stay_on_device(self, decodes: Seq[Sequence]) -> bool:
        """Return True if the next round of these sequences may run on the device.

        Nothing should be announced ahead of such a round.
        """
        if not self._drafter.device_resident or len(decodes) > self.most_on_device:
            return False
        if any(
            one.request.speculation.trace or not one.wants_drafts or self._follower.obstacle(one)
            for one in decodes
        ):
            return False
        kinds = {(one.request.speculation.forms, one.controller_row is None) for one in decodes}
        return len(kinds) == 1

    def wait_limit_s(self, decodes: Seq[Sequence]) -> float | None:
        """Return the longest time that the device may wait for the trees of a batch; None for no limit."""
        if any(sequence.controller_row is None for sequence in decodes):
            return None
        return self._controller.wait_cap_s([self._bound(sequence) for sequence in decodes], len(decodes))

    def _plain_by_choice(self, decodes: Seq[Sequence], wanting: Seq[Sequence]) -> DraftShape | None:
        """Return `NO_DRAFT` if the controller chooses no drafts for all rows of a remote draft.

        Otherwise keep its choice for the next `announce` and return None.
        """
        if any(sequence.controller_row is None for sequence in wanting):
            return None
        shapes = self._shapes(decodes)
        if not any(shape.drafts for shape in shapes):
            return NO_DRAFT
        self._chosen = [sequence.session_id for sequence in decodes], shapes
        return None

    def _shapes(self, decodes: Seq[Sequence]) -> list[DraftShape]:
        (session_ids, chosen), self._chosen = self._chosen, ([], [])
        if session_ids and session_ids == [sequence.session_id for sequence in decodes]:
            return chosen
        shapes = [NO_DRAFT] * len(decodes)
        auto: list[int] = []
        for index, sequence in enumerate(decodes):
            if not sequence.wants_drafts:
                continue
            reason = self._follower.obstacle(sequence)
            if reason:
                sequence.stats.fell_back(reason)
                self._metrics.fell_back(reason)
            elif sequence.controller_row is not None:
                auto.append(index)
            else:
                shapes[index] = sequence.request.speculation.shape
        if auto:
            other_nodes = sum(shape.max_nodes for shape in shapes) - len(auto)
            chosen = self._controller.choose(
                [self._bound(decodes[index]) for index in auto], len(decodes), other_nodes
            )
            for index, shape in zip(auto, chosen, strict=True):
                shapes[index] = shape
        return shapes

    def _bound(self, sequence: Sequence) -> RowBound:
        assert sequence.controller_row is not None
        bound, *chain = sequence.request.speculation.forms
        return RowBound(sequence.controller_row, bound, sequence.remaining - 1, *chain)
