"""Chooses the tree shape of each entry of a round, and counts entries that fall back to plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.policy.controller import EntryBound, SpeculationController
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.policy.fixed_share import FixedShare
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

OVER_BUDGET = "budget"
"""Fallback reason of an entry whose tree does not fit into `max_packed_rows`, or would delay the others."""
JOINED = "joined"
"""Reason of an entry that has no tree because it joined the round after the trees had been requested."""


class DraftPlanner:
    """Chooses the tree shape with which each sequence of a round drafts. Engine thread only.

    A round through the host is planned before it is launched, so that its trees can be requested early. The
    planner keeps the shapes that were chosen then.

    Args:
        sessions: The drafter's sessions.
        controller: Chooses the tree shapes of sequences in mode `auto`.
        metrics: Counts fallbacks.
        max_rows: Largest number of packed rows of a round, i.e. of tree nodes of all sequences.
    """

    def __init__(
        self,
        sessions: DraftSessions,
        controller: SpeculationController,
        metrics: TargetMetrics,
        max_rows: int,
    ) -> None:
        self._sessions = sessions
        self._controller = controller
        self._metrics = metrics
        self._max_rows = max_rows
        self._turn = 0
        self._share = FixedShare()
        # Shapes that were already chosen for the next round, by session.
        self._kept: dict[int, DraftShape] = {}

    def keep(self, decodes: Iterable[tuple[Sequence, DraftShape]]) -> None:
        """Keep the shapes of a round that is not launched yet, for the next call of `shapes`."""
        self._kept = {sequence.session_id: shape for sequence, shape in decodes}

    def forget(self, sequence: Sequence) -> None:
        """Forget the shape that was kept for a sequence."""
        self._kept.pop(sequence.session_id, None)

    def shapes(self, decodes: Seq[Sequence], path: DraftPath, *, requested: bool = False) -> list[DraftShape]:
        """Choose the tree shape of each sequence of a round, unless its shape was kept.

        The reason of a kept shape (`SpeculationStats.reason`) stays as it is.

        Args:
            decodes: The sequences of the round.
            path: How the trees of the round reach the target.
            requested: True if the trees of the round have been requested already. Sequences without a kept
                shape then do not draft.

        Returns:
            The tree shape of each sequence, limited as by `DraftShape.bounded`. `NO_DRAFT` for a sequence
            that drafts no tokens.
        """
        # 1. Find the sequences for which `auto` must choose. All others have a shape, or do not draft.
        kept, self._kept = self._kept, {}
        known = [kept.get(sequence.session_id) for sequence in decodes]
        shapes = [shape or NO_DRAFT for shape in known]
        auto: list[int] = []
        away = 0
        verdict = self._controller.verdict
        for index, sequence in enumerate(decodes):
            if known[index] is not None:
                continue  # its reason is known too
            if requested:
                sequence.stats.reason = sequence.never_drafts or JOINED
                continue
            if not sequence.wants_drafts:
                sequence.stats.reason = sequence.never_drafts
                continue
            sequence.stats.reason = "" if sequence.controller_state is None else verdict.reason.value
            reason = self._sessions.obstacle(sequence)
            if reason:
                self.fell_back(sequence, reason)
                away += sequence.controller_state is not None
            elif sequence.controller_state is not None:
                auto.append(index)
            else:
                shapes[index] = sequence.request.speculation.shape.bounded()
        # 2. Choose for all `auto` sequences at once, because they share the time of the round.
        if auto:
            chosen_here = set(auto)
            others = [shape for index, shape in enumerate(shapes) if index not in chosen_here]
            entries = [bound_of(decodes[index]) for index in auto]
            chosen = self._controller.choose(entries, others, path)
            for index, shape in zip(auto, chosen, strict=True):
                shapes[index] = shape.bounded() if shape.drafts else NO_DRAFT
                decodes[index].stats.reason = self._controller.verdict.reason.value
        elif away:
            self._controller.draft_away(away, len(decodes))
        # 3. Keep the round within its limits of time and rows.
        if not requested and all(shape is None for shape in known):
            self._bound_fixed(decodes, shapes, auto, path)
        return self._within_budget(decodes, shapes, auto)

    def expects_drafts(self, sequence: Sequence) -> bool:
        """Return True if a sequence will probably draft in its first round."""
        if sequence.controller_state is None:
            return sequence.wants_drafts
        return self._controller.would_draft(bound_of(sequence))

    def fell_back(self, sequence: Sequence, reason: str) -> None:
        """Count a round in which a sequence gets no drafts although its request drafts."""
        sequence.stats.fell_back(reason)
        self._metrics.fell_back(reason)

    def _bound_fixed(
        self, decodes: Seq[Sequence], shapes: list[DraftShape], auto: Seq[int], path: DraftPath
    ) -> None:
        """Limit the time that trees of fixed shapes add to a round with other entries. See `FixedShare`.

        If all entries have fixed shapes, the entries with the smallest trees count as the other entries.
        """
        # 1. Find the entries to limit.
        of_auto = set(auto)
        fixed = [index for index, shape in enumerate(shapes) if shape.drafts and index not in of_auto]
        if len(fixed) == len(shapes):
            smallest = min((shape.max_nodes for shape in shapes), default=0)
            fixed = [index for index in fixed if shapes[index].max_nodes > smallest]
        if not fixed:
            return
        # 2. Choose the entries that keep their trees.
        places = {decodes[index].session_id: index for index in fixed}
        bounded = set(fixed)
        others = [shape for index, shape in enumerate(shapes) if index not in bounded]
        nodes = sum(shape.max_nodes for shape in others) + len(fixed)
        groups = Counter(shape for shape in others if shape.drafts)
        costs = self._controller.costs
        if not costs.measured_plain:  # the estimate of a round without trees would be a guess
            return

        def round_s(session_ids: Seq[int]) -> float:
            chosen = [shapes[places[one]] for one in session_ids]
            more = sum(shape.max_nodes - 1 for shape in chosen)
            return costs.round(len(shapes), nodes + more, groups + Counter(chosen), path)

        drafting = self._share.choose(list(places), round_s([]), round_s)
        for session_id, index in places.items():
            if session_id not in drafting:
                shapes[index] = NO_DRAFT
                self.fell_back(decodes[index], OVER_BUDGET)

    def _within_budget(
        self, decodes: Seq[Sequence], shapes: list[DraftShape], auto: Seq[int]
    ) -> list[DraftShape]:
        """Shrink a round to `max_packed_rows`. Trees of entries in mode `auto` are dropped first."""
        total = sum(shape.max_nodes for shape in shapes)
        if total <= self._max_rows:
            return shapes
        of_auto = set(auto)
        fixed = [index for index, shape in enumerate(shapes) if shape.drafts and index not in of_auto]
        # The sequences in mode `on` that keep their trees change from round to round, so that each has its
        # turn.
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


def bound_of(sequence: Sequence) -> EntryBound:
    """Return the draft bounds of an entry in mode `auto`."""
    assert sequence.controller_state is not None
    bound, *chain = sequence.request.speculation.forms
    return EntryBound(
        sequence.controller_state,
        bound,
        sequence.remaining - 1,
        chain[0] if chain else NO_DRAFT,
        sequence.committed_len,
    )
