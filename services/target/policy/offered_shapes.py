"""The tree shapes that mode `auto` may choose for rounds that are drafted on the device.

This set of shapes is small, because the draft of each shape needs a CUDA graph for every batch size.
"""

from __future__ import annotations

from functools import lru_cache

from outrider.shared.spec.tree import DraftShape

CHAIN_DEPTHS = (1, 3, 5)
"""Depths of the chains that are offered in addition to the longest allowed one."""
TREE_DEPTHS = (1, 2, 3, 5, 8, 12)
"""Depths of the trees that are offered in addition to the largest tree. They apply if no chain is allowed."""

MOST_ROWS = 512
"""Maximum number of rows, i.e. nodes of the whole batch, of an offered shape.

Larger passes are limited by arithmetic, so each further node prolongs the pass.
"""


def cut(bound: DraftShape, depth: int) -> DraftShape:
    """Return the shape `bound` cut to `depth` levels, with the same number of nodes per level."""
    return DraftShape(depth, bound.topk, nodes_of(bound, depth)).bounded()


def nodes_of(bound: DraftShape, depth: int) -> int:
    """Return the number of nodes of the shape `bound` cut to `depth` levels, including the root."""
    if depth <= 0:
        return 1
    return 1 + -(-(bound.max_nodes - 1) * depth // bound.depth)


@lru_cache(maxsize=256)
def offered_shapes(forms: tuple[DraftShape, ...], batch_size: int) -> tuple[DraftShape, ...]:
    """Return the tree shapes that mode `auto` may choose: trees or chains or both, each ordered by depth.

    Args:
        forms: The limits of the request's shapes: the largest tree, the longest chain, or both; see
            `SpeculationParams.forms`.
        batch_size: Number of sequences. Shapes with which all sequences together would have more than
            `MOST_ROWS` tree nodes are left out. The smallest shape is always offered.
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
