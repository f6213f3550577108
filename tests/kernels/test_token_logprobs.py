"""token_logprobs: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from guards import Guards
from rule_cases import check_logprobs


@pytest.mark.parametrize("vocab", [48, 4096, 4129])
def test_logprobs(vocab: int) -> None:
    check_logprobs("cpu", torch.float32, vocab, Guards())
    check_logprobs("cpu", torch.float16, vocab, Guards(64))
