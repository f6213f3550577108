"""Computes the expected tokens of each entry of a round, for each shape that the entry may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.services.target.policy.acceptance import MAX_DEPTH
from outrider.services.target.policy.controller_inputs import EntryBound
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.policy.partition import EntryClass
from outrider.shared.spec.tree import DraftShape

ExpectedTokens = Mapping[DraftShape, float]
"""Expected tokens of one entry in a round, for each shape that the entry may have."""


class Expectations:
    """The expected tokens per round of the `auto` requests of the batch, for each tree shape.

    Requests with equal expectations share one mapping.

    Args:
        entries: The `auto` requests.

    Attributes:
        tokens: For each request, its expected tokens by tree shape. Empty for a request that cannot use
            drafts.
    """

    def __init__(self, entries: Sequence[EntryBound]) -> None:
        self._alike: dict[object, ExpectedTokens] = {}
        self.tokens = [self._of(entry) for entry in entries]

    def classes(self) -> list[EntryClass]:
        """Return the entries, grouped by equal expectations."""
        counts: dict[int, int] = {}
        for tokens in self.tokens:
            counts[id(tokens)] = counts.get(id(tokens), 0) + 1
        return [EntryClass(tokens, counts[id(tokens)]) for tokens in self._alike.values()]

    def _of(self, entry: EntryBound) -> ExpectedTokens:
        acceptance, useful = entry.state.acceptance, max(0, min(entry.useful_depth, MAX_DEPTH))
        key = (entry.forms, acceptance.kind, acceptance.level, useful)
        if key not in self._alike:
            self._alike[key] = expected_tokens(entry)
        return self._alike[key]


def expected_tokens(entry: EntryBound) -> dict[DraftShape, float]:
    """Return the expected tokens of an entry for each shape that it may have."""
    if entry.useful_depth <= 0:
        return {}
    by_form = {chain: entry.state.acceptance.expected_tokens(chain) for chain in (False, True)}
    deepest = min(entry.useful_depth, MAX_DEPTH)
    return {
        shape: by_form[shape.topk == 1][min(shape.depth, deepest)] for shape in offered_shapes(entry.forms, 1)
    }
