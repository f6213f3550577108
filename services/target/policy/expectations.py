"""Computes the expected tokens of each row of a round, for each shape that the row may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.services.target.policy.acceptance import MAX_DEPTH
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.services.target.policy.partition import RowClass
from outrider.services.target.policy.row_state import RowBound
from outrider.shared.spec.tree import DraftShape

ExpectedTokens = Mapping[DraftShape, float]
"""Expected tokens of one row in a round, for each shape that the row may have."""


class Expectations:
    """The expected tokens per round of the `auto` requests of the batch, for each tree shape.

    Requests with equal expectations share one mapping.

    Args:
        rows: The `auto` requests.

    Attributes:
        tokens: For each request, its expected tokens by tree shape. Empty for a request that cannot use
            drafts.
    """

    def __init__(self, rows: Sequence[RowBound]) -> None:
        self._alike: dict[object, ExpectedTokens] = {}
        self.tokens = [self._of(row) for row in rows]

    def classes(self) -> list[RowClass]:
        """Return the rows, grouped by equal expectations."""
        counts: dict[int, int] = {}
        for tokens in self.tokens:
            counts[id(tokens)] = counts.get(id(tokens), 0) + 1
        return [RowClass(tokens, counts[id(tokens)]) for tokens in self._alike.values()]

    def _of(self, row: RowBound) -> ExpectedTokens:
        acceptance, useful = row.state.acceptance, max(0, min(row.useful_depth, MAX_DEPTH))
        key = (row.forms, acceptance.kind, acceptance.level, useful)
        if key not in self._alike:
            self._alike[key] = expected_tokens(row)
        return self._alike[key]


def expected_tokens(row: RowBound) -> dict[DraftShape, float]:
    """Return the expected tokens of a row for each shape that it may have."""
    if row.useful_depth <= 0:
        return {}
    by_form = {chain: row.state.acceptance.expected_tokens(chain) for chain in (False, True)}
    deepest = min(row.useful_depth, MAX_DEPTH)
    return {
        shape: by_form[shape.topk == 1][min(shape.depth, deepest)] for shape in offered_shapes(row.forms, 1)
    }
