"""Tests of the compiled filtered_choice at a real vocabulary size: it filters and chooses as sorting does."""

import pytest
import torch
from filter_cases import check_choices, check_kept_tokens, check_mixed_choices, check_ties
from guards import Guards

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "masked"])
def test_what_is_kept_is_what_the_law_keeps(kind: str, dtype: torch.dtype) -> None:
    for rows, vocab in ((13, 128_256), (40, 32_003)):
        check_kept_tokens(kind, rows, vocab, dtype, "cuda", Guards(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_are_chosen_as_from_what_sorting_keeps(dtype: torch.dtype) -> None:
    check_choices(32_000, 512, dtype, "cuda", Guards(67))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_with_and_without_filters_share_a_batch(dtype: torch.dtype) -> None:
    for rows in (3, 64, 1100):
        check_mixed_choices(rows, 9000, dtype, "cuda", Guards(64))


@pytest.mark.parametrize("vocab", [700, 128_256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_logits_are_kept_in_the_order_of_their_ids(vocab: int, dtype: torch.dtype) -> None:
    check_ties(vocab, dtype, "cuda", Guards(64))
