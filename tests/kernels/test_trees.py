"""tree_build and verify_tree: interpreted Triton versions equal the references and stay in their buffers."""

import pytest
from guards import Guards
from tree_cases import check_tree_build, check_verify_tree


@pytest.mark.parametrize(
    ("bs", "depth", "topk", "columns"),
    [(1, 1, 1, 2), (5, 4, 3, 12), (3, 5, 4, 33), (2, 3, 8, 64), (2, 2, 2, 40), (2, 5, 5, 70), (1, 6, 1, 7)],
)
def test_tree_build_equals_the_reference(bs: int, depth: int, topk: int, columns: int) -> None:
    check_tree_build("cpu", bs, depth, topk, columns, Guards())


@pytest.mark.parametrize("columns", [1, 2, 7, 33])
@pytest.mark.parametrize("bs", [1, 5])
def test_verify_tree_equals_the_reference(bs: int, columns: int) -> None:
    check_verify_tree("cpu", bs, columns, Guards())
