"""Interpreted merge_attention against attention over all tokens, computed in fp64."""

import pytest
import torch
from guards import Guards
from merge_cases import check_merge, check_poison, check_unseen

from outrider.kernels.merge_attention import merge_attention


@pytest.mark.parametrize(
    ("part", "out"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 1), (7, 3, 24), (5, 8, 128)])
def test_merged_parts_are_attention_over_all_tokens(
    part: torch.dtype, out: torch.dtype, rows: int, heads: int, dim: int
) -> None:
    check_merge("cpu", part, out, rows, heads, dim, Guards())


def test_a_part_that_saw_nothing_is_ignored() -> None:
    check_unseen("cpu")


def test_a_nan_reaches_the_result() -> None:
    check_poison("cpu")


def test_wrong_arguments_are_named() -> None:
    part, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="second_lse has shape"):
        merge_attention(part, lse, part, lse.t())
    with pytest.raises(ValueError, match="first_lse has dtype"):
        merge_attention(part, lse.half(), part, lse)
    with pytest.raises(ValueError, match="out must have a dense last dimension"):
        merge_attention(part, lse, part, lse, out=torch.zeros(2, 4, 3).transpose(1, 2))
