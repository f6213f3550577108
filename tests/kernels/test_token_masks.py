"""token_masks: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from guards import Guards
from rule_cases import check_masks


@pytest.mark.parametrize("vocab", [31, 48, 4096, 4129])
def test_masks(vocab: int) -> None:
    check_masks("cpu", torch.float32, vocab, Guards())
    check_masks("cpu", torch.float16, vocab, Guards(64))
