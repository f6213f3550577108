"""verify_round: the interpreted Triton version equals the reference and fulfils the contract.

The Triton version also stays in its buffers.
"""

import pytest
import torch
from guards import Guards
from round_cases import (
    check_accept_round,
    check_begin_round,
    check_place_rows,
    check_post_parts,
    check_post_round,
)

from outrider.kernels.verify_round import post_parts


@pytest.mark.parametrize(("bs", "columns"), [(1, 1), (3, 6), (9, 17)])
def test_begin_round(bs: int, columns: int) -> None:
    check_begin_round("cpu", bs, columns, Guards())


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("bs", "nodes"), [(1, 1), (5, 6), (4, 33)])
def test_place_rows(bs: int, nodes: int, page_size: int) -> None:
    check_place_rows("cpu", bs, nodes, page_size, Guards())


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("bs", "nodes", "columns", "page_size"),
    [(1, 1, 1, 16), (6, 6, 6, 3), (5, 33, 7, 1), (7, 2, 6, 16), (4, 1, 6, 4)],
)
def test_accept_round(bs: int, nodes: int, columns: int, page_size: int, with_state: bool) -> None:
    check_accept_round("cpu", bs, nodes, columns, page_size, with_state, Guards())


@pytest.mark.parametrize(("bs", "columns"), [(1, 4), (16, 14), (64, 18)])
def test_post_round(bs: int, columns: int) -> None:
    check_post_round("cpu", bs, columns, Guards())


@pytest.mark.parametrize("sizes", [[4], [16, 1, 1], [14 * 16, 300, 0, 2500]])
def test_post_parts(sizes: list[int]) -> None:
    check_post_parts("cpu", sizes, Guards())


def test_parts_that_do_not_fit_are_refused() -> None:
    words, turn = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="parts has 6 elements, but an entry of ring has 5"):
        post_parts([words, words], torch.zeros(2, 5, dtype=torch.int32), turn)
    with pytest.raises(ValueError, match="parts has 5 tensors, expected 1 to 4"):
        post_parts([words] * 5, torch.zeros(2, 50, dtype=torch.int32), turn)
    with pytest.raises(ValueError, match=r"parts\[0\] has dtype"):
        post_parts([words.float()], torch.zeros(2, 5, dtype=torch.int32), turn)
