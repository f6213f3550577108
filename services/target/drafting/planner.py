"""Chooses the tree shape of every row of a round, and counts the rows that wanted drafts but get none."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.policy.controller import RowBound, SpeculationController
from outrider.services.target.policy.fixed_share import FixedShare
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

OVER_BUDGET = "budget"
"""Fallback reason of a row whose tree does not fit into `max_packed_rows`, or would slow down other rows."""


class DraftPlanner:
    """Chooses tree shapes. Engine thread only.

    Args:
        sessions: The drafter's sessions.
        controller: Chooses the shapes of rows in mode `auto`.
        metrics: Counts fallbacks.
        max_rows: Largest number of packed rows of a round.
        on_device: Returns True if rounds are drafted on the device, before the previous round has been
            read.
    """

    def __init__(
        self,
        sessions: DraftSessions,
        controller: SpeculationController,
        metrics: TargetMetrics,
        max_rows: int,
        *,
        on_device: Callable[[], bool],
    ) -> None:
        self._sessions = sessions
        self._controller = controller
        self._metrics = metrics
        self._max_rows = max_rows
        self._on_device = on_device
        self._turn = 0
        self._share = FixedShare()

    def shapes(self, decodes: Seq[Sequence], planned: Seq[DraftShape | None] = ()) -> list[DraftShape]:
        """Choose the shape of each row.

        Args:
            decodes: The rows of a round.
            planned: The shapes of rows that were chosen for this round already; None for the other rows. By
                default, all rows are chosen.

        Returns:
            The bounded shape of each row; `NO_DRAFT` for a row that verifies its root alone.
        """
        known = planned or [None] * len(decodes)
        shapes = [shape or NO_DRAFT for shape in known]
        auto: list[int] = []
        for index, sequence in enumerate(decodes):
            if known[index] is not None or not sequence.wants_drafts:
                continue
            reason = self._sessions.obstacle(sequence)
            if reason:
                self.fell_back(sequence, reason)
            elif sequence.controller_row is not None:
                auto.append(index)
            else:
                shapes[index] = sequence.request.speculation.shape.bounded()
        if auto:
            other_nodes = sum(shape.max_nodes for shape in shapes) - len(auto)
            rows = [bound_of(decodes[index]) for index in auto]
            choose = self._controller.choose_common if self._on_device() else self._controller.choose
            chosen = choose(rows, len(decodes), other_nodes)
            for index, shape in zip(auto, chosen, strict=True):
                shapes[index] = shape.bounded() if shape.drafts else NO_DRAFT
        if not planned or all(shape is None for shape in planned):
            self._bound_fixed(decodes, shapes, auto)
        return self._within_budget(decodes, shapes, auto)

    def fell_back(self, sequence: Sequence, reason: str) -> None:
        """Count a round in which a row wanted drafts and gets none."""
        sequence.stats.fell_back(reason)
        self._metrics.fell_back(reason)

    def _bound_fixed(self, decodes: Seq[Sequence], shapes: list[DraftShape], auto: Seq[int]) -> None:
        """Bound the time that trees of fixed shapes add to a round of other rows. See `FixedShare`.

        If all rows have fixed shapes, the rows with the smallest trees are the other rows.
        """
        # 1. Find the rows to bound.
        of_auto = set(auto)
        fixed = [index for index, shape in enumerate(shapes) if shape.drafts and index not in of_auto]
        if len(fixed) == len(shapes):
            smallest = min((shape.max_nodes for shape in shapes), default=0)
            fixed = [index for index in fixed if shapes[index].max_nodes > smallest]
        if not fixed:
            return
        # 2. Choose those that keep their trees.
        places = {decodes[index].session_id: index for index in fixed}
        bounded = set(fixed)
        others = [shape for index, shape in enumerate(shapes) if index not in bounded]
        nodes = sum(shape.max_nodes for shape in others) + len(fixed)
        depth = max((shape.depth for shape in others if shape.drafts), default=0)

        def round_s(session_ids: Seq[int]) -> float:
            chosen = [shapes[places[one]] for one in session_ids]
            more = sum(shape.max_nodes - 1 for shape in chosen)
            deepest = max([depth, *(shape.depth for shape in chosen)])
            estimate = self._controller.estimated_s(
                len(shapes), nodes + more, deepest, on_device=self._on_device()
            )
            return estimate or 0.0

        base_s = round_s([])
        if not base_s:
            return
        drafting = self._share.choose(list(places), base_s, round_s)
        for session_id, index in places.items():
            if session_id not in drafting:
                shapes[index] = NO_DRAFT
                self.fell_back(decodes[index], OVER_BUDGET)

    def _within_budget(
        self, decodes: Seq[Sequence], shapes: list[DraftShape], auto: Seq[int]
    ) -> list[DraftShape]:
        """Shrink a round to `max_packed_rows`: first rows in mode `auto`, then rows in mode `on` in turn."""
        total = sum(shape.max_nodes for shape in shapes)
        if total <= self._max_rows:
            return shapes
        of_auto = set(auto)
        fixed = [index for index, shape in enumerate(shapes) if shape.drafts and index not in of_auto]
        # The rows that keep their trees change from round to round, so that each row has its turn.
        self._turn += 1
        first = self._turn % max(1, len(fixed))
        for index in (*auto, *fixed[first:], *fixed[:first]):
            if total <= self._max_rows:
                break
            if shapes[index].drafts:
                total -= shapes[index].max_nodes - 1
                shapes[index] = NO_DRAFT
                self.fell_back(decodes[index], OVER_BUDGET)
        return shapes


def bound_of(sequence: Sequence) -> RowBound:
    """Return the draft bounds of a row in mode `auto`."""
    assert sequence.controller_row is not None
    bound, *chain = sequence.request.speculation.forms
    return RowBound(sequence.controller_row, bound, sequence.remaining - 1, *chain)
