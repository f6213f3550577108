"""feature_rows: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from feature_cases import check_scatter_rows
from guards import Guards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize(("count", "width"), [(1, 64), (7, 37), (19, 1100)])
def test_scatter_rows_equals_the_reference(dtype: torch.dtype, splits: int, count: int, width: int) -> None:
    check_scatter_rows("cpu", dtype, count, width, splits, Guards())
