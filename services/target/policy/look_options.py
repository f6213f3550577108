"""Lists the looks that a decision may include: their shapes, their entries and their estimated losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from outrider.services.target.policy.controller_inputs import EntryBound
from outrider.services.target.policy.cost_model import StepCosts
from outrider.services.target.policy.expectations import ExpectedTokens
from outrider.services.target.policy.looks import LookOption
from outrider.services.target.policy.partition import Others, Partition, Partitions
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

LOOK_ENTRIES = 4
"""Number of entries that take part in a look."""
LOOKS_APART = 64
"""A look prefers entries with few tokens that the drafter has not processed, and with few earlier looks. This
many tokens weigh as much as one look."""


class LookOptions:
    """Computes the possible looks: rounds that measure tree shapes that the best partition does not use.

    Args:
        entries: The `auto` requests, with the shapes of the best partition.
        expected: The expected tokens of each request, by shape.
        best: The best partition, i.e. division of the requests among tree shapes and plain decoding.
        partitions: All partitions of the round's requests.
        others: The other requests of the round.
        costs: The measured costs.
        known: True if the acceptance of the drafter is known.
    """

    def __init__(
        self,
        entries: Sequence[EntryBound],
        expected: Sequence[ExpectedTokens],
        best: Partition,
        partitions: Partitions,
        others: Others,
        costs: StepCosts,
        *,
        known: bool,
    ) -> None:
        self._entries = entries
        self._expected = expected
        self._best = best
        self._partitions = partitions
        self._others = others
        self._costs = costs
        self._known = known

    def all(self) -> dict[DraftShape, LookOption]:
        """Return the cheapest look for each tree shape that is not in use.

        A look consists of rounds that only measure a shape. Two looks are compared for each shape. In the
        first, only a few requests draft the shape: those for which the drafter catches up fast, and that took
        part in few looks. In the second, all requests that draft use the shape, so that the round needs no
        draft of the old shape.
        """
        entries, best, partitions = self._entries, self._best, self._partitions
        able = [index for index, entry in enumerate(entries) if entry.useful_depth > 0]
        able.sort(key=lambda index: entries[index].lag + LOOKS_APART * entries[index].state.looks)
        drafting = [index for index in able if entries[index].state.shape.drafts]
        few = able[:LOOK_ENTRIES]
        options: dict[DraftShape, LookOption] = {}
        for looking in filter(None, (few, drafting)):
            for shape in partitions.offered:
                if shape in best.shapes or not any(shape in self._expected[index] for index in looking):
                    continue
                option = self._option(looking, shape)
                if option.loss_s < (options[shape].loss_s if shape in options else math.inf):
                    options[shape] = option
        if best.shapes and self._others.nodes == self._others.count:
            batch_size = partitions.batch_size
            loss_s = partitions.plain.seconds - batch_size / best.rate
            unsure = self._costs.doubts(batch_size, batch_size, NO_DRAFT)
            options[NO_DRAFT] = LookOption(loss_s, able, unsure=unsure)
        return options

    def _option(self, looking: Sequence[int], shape: DraftShape) -> LookOption:
        groups = Counter({of: count for of, count in self._others.shapes.items() if of.drafts})
        tokens, nodes, moved = self._others.tokens, self._others.nodes, set(looking)
        for index, entry in enumerate(self._entries):
            own = shape if index in moved and shape in self._expected[index] else entry.state.shape
            tokens += self._expected[index].get(own, 1.0) if self._known else 1.0
            nodes += own.max_nodes
            if own.drafts:
                groups[own] += 1
        batch_size, path = self._partitions.batch_size, self._partitions.path
        if nodes > self._partitions.most_rows:
            return LookOption(math.inf, looking, unsure=False)
        loss_s = self._costs.round(batch_size, nodes, groups, path) - tokens / self._best.rate
        unsure = not self._known or self._costs.doubts(batch_size, nodes, shape)
        return LookOption(loss_s, looking, unsure=unsure)
