"""The shapes that `auto` chooses among for batches on the device: each is a graph of its own for every batch size."""

from __future__ import annotations

from functools import lru_cache

from outrider.shared.spec.tree import DraftShape

CHAIN_DEPTHS = (1, 3, 5)
"""Beside the longest chain that is allowed."""
TREE_DEPTHS = (1, 2, 3, 5, 8, 12)
"""Beside a tree's own depth, where there are no chains for what is shallower."""

MOST_ROWS = 512
"""A larger pass is bound by arithmetic: what more it verifies it takes longer for."""


def cut(bound: DraftShape, depth: int) -> DraftShape:
    """Return a tree (or chain) of `depth` levels, as dense per level as the bound."""
    return DraftShape(depth, bound.topk, nodes_of(bound, depth)).bounded()


def nodes_of(bound: DraftShape, depth: int) -> int:
    """Return the nodes of a tree cut to `depth` levels, the root included."""
    if depth <= 0:
        return 1
    return 1 + -(-(bound.max_nodes - 1) * depth // bound.depth)


@lru_cache(maxsize=256)
def offered_shapes(forms: tuple[DraftShape, ...], batch_size: int) -> tuple[DraftShape, ...]:
    """Return every shape that is offered to a batch within these forms, the smallest of each first.

    Args:
        forms: See `SpeculationParams.forms`.
        batch_size: Rows; of what is too large for so many the smallest shape remains.
    """
    shapes: list[DraftShape] = []
    for form in forms:
        if form.drafts:
            depths = CHAIN_DEPTHS if form.topk == 1 else TREE_DEPTHS if len(forms) == 1 else ()
            shapes += [
                cut(form, depth) for depth in (*(one for one in depths if one < form.depth), form.depth)
            ]
    fitting = [shape for shape in shapes if batch_size * shape.max_nodes <= MOST_ROWS]
    return tuple(dict.fromkeys(fitting or sorted(shapes, key=lambda shape: shape.max_nodes)[:1]))
