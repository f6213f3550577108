"""Tests of the compiled logit_rules, token_logprobs and token_masks against their references on a GPU."""

from __future__ import annotations

import pytest
import torch
from guards import Guards
from rule_cases import check_choice_with_rules, check_logprobs, check_masks, check_rules

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [37, 5003, 128256])
def test_rules(dtype: torch.dtype, vocab: int) -> None:
    matches = [check_rules("cuda", dtype, vocab, Guards(64), seed) for seed in range(6)]
    assert sum(matches) > 3, "some bad words must match"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [48, 5003, 128256])
def test_logprobs(dtype: torch.dtype, vocab: int) -> None:
    check_logprobs("cuda", dtype, vocab, Guards(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [48, 5003, 128256])
def test_masks(dtype: torch.dtype, vocab: int) -> None:
    check_masks("cuda", dtype, vocab, Guards(64))


@pytest.mark.parametrize("vocab", [40, 5003])
def test_a_token_is_chosen_after_the_rules(vocab: int) -> None:
    check_choice_with_rules("cuda", vocab, Guards(), seed=3)
