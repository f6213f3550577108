"""Interpreted exchange_add: sums over ranks that are all in the test process."""

import pytest
import torch
from exchange_cases import check_exchange, check_lost_rank
from guards import Guards


@pytest.mark.parametrize(
    ("dtype", "ranks", "width", "bias"),
    [
        (torch.float32, 2, 600, False),
        (torch.bfloat16, 2, 512, True),
        (torch.bfloat16, 4, 96, False),
        (torch.float16, 3, 40, True),
    ],
)
def test_ranks_add_up_and_leave_nothing_behind(
    dtype: torch.dtype, ranks: int, width: int, bias: bool
) -> None:
    check_exchange(
        "cpu", dtype, ranks, [(1, 0), (3, 2), (1, 0), (2, 0), (3, 1), (1, 3)], width, Guards(), bias=bias
    )


def test_a_rank_that_sends_nothing_is_waited_for_once() -> None:
    check_lost_rank("cpu", Guards())
