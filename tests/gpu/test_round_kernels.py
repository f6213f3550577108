"""Tests of the compiled verify_round and feature_rows against their references on a GPU."""

from __future__ import annotations

import pytest
import torch
from feature_cases import check_feature_rows, check_scatter_rows
from guards import Guards
from round_cases import (
    check_accept_round,
    check_begin_round,
    check_place_rows,
    check_post_parts,
    check_post_round,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("bs", "columns"), [(1, 1), (3, 6), (64, 17)])
def test_begin_round(bs: int, columns: int) -> None:
    check_begin_round("cuda", bs, columns, Guards())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("bs", "nodes"), [(1, 1), (5, 6), (64, 33), (4, 128)])
def test_place_rows(bs: int, nodes: int, page_size: int) -> None:
    check_place_rows("cuda", bs, nodes, page_size, Guards())


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("bs", "nodes", "columns"), [(1, 1, 1), (64, 6, 6), (16, 128, 17), (7, 2, 6), (4, 1, 6)]
)
def test_accept_round(bs: int, nodes: int, columns: int, with_state: bool) -> None:
    check_accept_round("cuda", bs, nodes, columns, 16, with_state, Guards())


@pytest.mark.parametrize(("bs", "columns"), [(1, 4), (16, 14), (64, 18)])
def test_post_round(bs: int, columns: int) -> None:
    check_post_round("cuda", bs, columns, Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize(("bs", "count", "width"), [(1, 6, 4096), (3, 1, 37), (2, 9, 256)])
def test_feature_rows(dtype: torch.dtype, splits: int, bs: int, count: int, width: int) -> None:
    check_feature_rows("cuda", dtype, bs, count, width, splits, Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize(("count", "width"), [(1, 4096), (7, 37), (19, 4096)])
def test_scatter_rows(dtype: torch.dtype, splits: int, count: int, width: int) -> None:
    check_scatter_rows("cuda", dtype, count, width, splits, Guards())


@pytest.mark.parametrize("sizes", [[4], [16, 1, 1], [14 * 16, 300, 0, 2500]])
def test_post_parts(sizes: list[int]) -> None:
    check_post_parts("cuda", sizes, Guards())
