"""The shapes that `outrider tune` compares."""

from __future__ import annotations

from outrider.services.tune.candidates import AutoLimits, candidate_shapes, shape_name
from outrider.services.tune.predict import LARGEST_RECORDED
from outrider.shared.spec.tree import NO_DRAFT, DraftShape


def test_candidates_stay_within_the_limits_and_can_use_all_their_nodes() -> None:
    limits = DraftShape(5, 4, 20)
    found = candidate_shapes(limits)
    assert len(set(found)) == len(found) > 10
    assert DraftShape(3, 1, 4) in found
    for shape in found:
        assert shape.depth <= limits.depth
        assert shape.topk <= limits.topk
        assert shape.max_nodes <= limits.max_nodes
        assert shape.bounded() == shape


def test_narrow_limits_leave_chains() -> None:
    assert {shape.topk for shape in candidate_shapes(DraftShape(4, 1, 8))} == {1}
    assert candidate_shapes(DraftShape(1, 1, 2)) == [DraftShape(1, 1, 2)]


def test_names() -> None:
    names = [shape_name(shape) for shape in (NO_DRAFT, DraftShape(3, 1, 4), DraftShape(5, 4, 16))]
    assert names == ["plain", "chain 3", "tree 5/4/16"]
    limits = AutoLimits(5, 4, 16)
    assert (shape_name(limits), shape_name(limits.shape)) == ("auto", "tree 5/4/16")
    assert limits != limits.shape, "they are different choices in a measurement"


def test_the_recorded_tree_contains_all_candidates() -> None:
    for shape in candidate_shapes(DraftShape(64, 64, 1024)):
        assert shape.depth <= LARGEST_RECORDED.depth
        assert shape.topk <= LARGEST_RECORDED.topk
        assert shape.max_nodes <= LARGEST_RECORDED.max_nodes
