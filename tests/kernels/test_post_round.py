"""post_round: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
from guards import Guards
from post_cases import check_post_round


@pytest.mark.parametrize(("bs", "columns"), [(1, 4), (16, 14), (64, 18), (230, 41)])
def test_post_round(bs: int, columns: int) -> None:
    check_post_round("cpu", bs, columns, Guards())
