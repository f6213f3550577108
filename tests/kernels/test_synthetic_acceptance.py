"""synthetic_acceptance: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
from guards import Guards
from synthetic_cases import check_packed_acceptance, check_synthetic_acceptance


@pytest.mark.parametrize(("bs", "columns"), [(1, 1), (4, 2), (3, 6), (5, 33), (2, 70)])
def test_synthetic_acceptance_equals_the_reference(bs: int, columns: int) -> None:
    check_synthetic_acceptance("cpu", bs, columns, Guards())


@pytest.mark.parametrize(("bs", "columns"), [(1, 1), (4, 2), (3, 6), (5, 33), (3, 150)])
def test_packed_trees_accept_what_padded_trees_do(bs: int, columns: int) -> None:
    check_packed_acceptance("cpu", bs, columns, Guards())
