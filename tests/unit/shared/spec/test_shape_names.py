"""The names of tree shapes, as logs and reports show them."""

from __future__ import annotations

from outrider.shared.spec.tree import NO_DRAFT, DraftShape


def test_a_name_tells_plain_decoding_chains_and_trees_apart() -> None:
    shapes = (NO_DRAFT, DraftShape(3, 1, 4), DraftShape(5, 4, 16))
    assert [shape.name for shape in shapes] == ["plain", "chain 3", "tree 5/4/16"]
