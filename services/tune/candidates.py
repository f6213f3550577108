"""The tree shapes that `outrider tune` compares."""

from __future__ import annotations

from outrider.shared.spec.tree import DraftShape

CHAIN_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
TREE_DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12)
TREE_WIDTHS = (2, 4, 8)
TREE_NODES = (8, 16, 32, 64)


class AutoLimits(DraftShape):
    """Mode `auto` within limits: the largest depth, width and number of nodes of a round.

    In measurements, mode `auto` with its limits takes the place of a shape.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """``auto``, whatever the limits are."""
        return "auto"

    @property
    def shape(self) -> DraftShape:
        """The largest shape within the limits."""
        return DraftShape(self.depth, self.topk, self.max_nodes)


def candidate_shapes(largest: DraftShape) -> list[DraftShape]:
    """Return the shapes of chains and trees that a server allows.

    A shape is left out if no tree of its depth and width can have its number of nodes.

    Args:
        largest: The largest depth, width and number of nodes that the server allows.
    """
    chains = [
        DraftShape(depth, 1, depth + 1)
        for depth in CHAIN_DEPTHS
        if depth <= largest.depth and depth < largest.max_nodes
    ]
    trees = [
        shape
        for depth in TREE_DEPTHS
        for topk in TREE_WIDTHS
        for nodes in TREE_NODES
        if depth <= largest.depth and topk <= largest.topk and depth < nodes <= largest.max_nodes
        if (shape := DraftShape(depth, topk, nodes)).bounded() == shape
    ]
    return chains + trees
