"""tree_check: the interpreted Triton version equals the reference, and each accepts only valid trees."""

import pytest
from check_cases import check_tree_check
from guards import Guards


@pytest.mark.parametrize(
    ("bs", "columns", "depth"),
    [(1, 2, 1), (9, 6, 5), (12, 16, 3), (8, 32, 5), (8, 33, 4), (5, 70, 16), (4, 1, 3)],
)
def test_tree_check_believes_trees_only(bs: int, columns: int, depth: int) -> None:
    check_tree_check("cpu", bs, columns, depth, Guards())


def test_trees_of_another_round_are_not_believed() -> None:
    check_tree_check("cpu", 8, 16, 4, Guards(), number=6, expected=7)
    check_tree_check("cpu", 8, 16, 4, Guards(), number=-1, expected=7)
