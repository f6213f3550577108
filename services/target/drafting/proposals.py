"""Requests trees from the drafter: chooses tree shapes, announces, collects the trees, counts fallbacks."""

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
"""Single-node trees are built on the host, because they are uploaded with the other inputs of a pass."""

ANSWERED = ("", "empty_tree")
"""Fallback reasons of a drafter that has answered, but with a single-node tree."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An announced request for trees.

    Attributes:
        request: The request as sent to the drafter.
        rows: The batch index of each row of the request.
        depth: Depth of the deepest requested tree.
        announced_at: Time of the announcement, from `time.monotonic()`.
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
        """Return the part of the proposal for the rows of another batch; None if that batch has none."""
        places = {sequence.session_id: index for index, sequence in enumerate(decodes)}
        found = [places.get(row.fence.session_id) for row in self.request.rows]
        rows = [place for place in found if place is not None]
        if len(rows) == len(found):
            return self if rows == self.rows else replace(self, rows=rows)
        kept = [row for row, place in zip(self.request.rows, found, strict=True) if place is not None]
        return replace(self, request=replace(self.request, rows=kept), rows=rows) if kept else None


class Proposals:
    """Chooses a tree shape for each sequence, requests trees, and counts fallbacks. Engine thread only.

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
        """Choose the tree shape of every row, and announce a request for the rows that can have drafts."""
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
        """Return one tree per sequence: the drafter's tree, or a single-node tree."""
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
        """Return the proposal if `wait_s` is a valid measurement of the cost of a proposal, else None.

        The measurement is invalid if the drafter has not answered and the wait ended before the deadline.

        Args:
            proposal: The proposal that was just collected. Nothing must have been announced afterwards.
            decodes: The batch.
            drafts: The result of `collect`.
            wait_s: Time in seconds that the batch waited for the proposal.
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
        """Return the common tree shape with which these sequences can stay on the device, or None.

        `NO_DRAFT` stands for plain decoding. Like `announce`, this method counts fallbacks.
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

        Do not announce a request ahead of such a round.
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
        """Return the limit in seconds of the device's wait for a batch's trees; None for no limit."""
        if any(sequence.controller_row is None for sequence in decodes):
            return None
        return self._controller.wait_cap_s([self._bound(sequence) for sequence in decodes], len(decodes))

    def _plain_by_choice(self, decodes: Seq[Sequence], wanting: Seq[Sequence]) -> DraftShape | None:
        """Return `NO_DRAFT` if the draft is remote and the controller chooses no drafts for any row.

        Otherwise return None and keep the controller's choice for the next `announce`.
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
