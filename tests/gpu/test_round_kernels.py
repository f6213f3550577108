"""Tests of the compiled post_round and feature_rows against their references on a GPU."""

from __future__ import annotations

import pytest
import torch
from feature_cases import check_scatter_rows
from guards import Guards
from post_cases import check_post_round

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("bs", "columns"), [(1, 4), (16, 14), (64, 18), (256, 41)])
def test_post_round(bs: int, columns: int) -> None:
    check_post_round("cuda", bs, columns, Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize(("count", "width"), [(1, 4096), (7, 37), (19, 4096)])
def test_scatter_rows(dtype: torch.dtype, splits: int, count: int, width: int) -> None:
    check_scatter_rows("cuda", dtype, count, width, splits, Guards())
