"""Tests of the compiled packed_round against its reference on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from guards import Guards
from packed_cases import Sizes, check_gather_group, check_round

pytestmark = pytest.mark.gpu

ROUND = Sizes(slots=64, columns=7, results=40, entries=256, widest=32, padding=5, nodes=32, words=4)
ROUNDS = [
    ROUND,
    Sizes(slots=1, columns=1, results=1, entries=1, widest=1, padding=0, nodes=1, words=1),
    replace(ROUND, results=8, entries=8, widest=300, nodes=400, words=13, page_size=16),
]


@pytest.mark.parametrize("sizes", ROUNDS, ids=lambda sizes: f"{sizes.results}x{sizes.widest}")
def test_a_round(sizes: Sizes) -> None:
    accepted = [check_round("cuda", sizes, seed % 2 == 0, seed, Guards()) for seed in range(4)]
    assert sizes.widest == 1 or any(accepted)


@pytest.mark.parametrize(("columns", "width"), [(1, 4096), (7, 4096), (3, 37), (7, 0)])
def test_gather_group(columns: int, width: int) -> None:
    check_gather_group("cuda", ROUND, columns, width, Guards())
