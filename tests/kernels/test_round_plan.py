"""round_plan: the interpreted Triton version equals the reference, and each fulfils the contract."""

import pytest
from guards import Guards
from plan_cases import check_round_plan


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize(
    ("bs", "rows", "depth", "topk", "page_size"),
    [(1, 6, 5, 8, 16), (5, 4, 3, 1, 1), (7, 5, 4, 3, 3), (2, 2, 1, 4, 16), (3, 3, 2, 5, 4)],
)
def test_round_plan_equals_the_reference(
    bs: int, rows: int, depth: int, topk: int, page_size: int, lead: int
) -> None:
    check_round_plan("cpu", bs, rows, depth, topk, page_size, lead, Guards())


@pytest.mark.parametrize("behind", [1, 2, 30])
@pytest.mark.parametrize(
    ("bs", "rows", "depth", "topk", "page_size"), [(7, 5, 4, 3, 3), (5, 4, 3, 1, 1), (3, 6, 2, 5, 4)]
)
def test_rows_of_a_later_layer_are_further_behind(
    bs: int, rows: int, depth: int, topk: int, page_size: int, behind: int
) -> None:
    check_round_plan("cpu", bs, rows, depth, topk, page_size, 0, Guards(), behind)
