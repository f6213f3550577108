"""logit_rules: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from guards import Guards
from rule_cases import check_choice_with_rules, check_rules


@pytest.mark.parametrize("vocab", [37, 2049])
def test_rules(vocab: int) -> None:
    matches = [
        check_rules("cpu", torch.float32, vocab, Guards(), seed, padding=seed % 3) for seed in range(6)
    ]
    assert sum(matches) > 3, "some bad words must match"


def test_rules_of_half_precision_logits_are_applied_in_full_precision() -> None:
    check_rules("cpu", torch.float16, 300, Guards(64), seed=9)


def test_a_token_is_chosen_after_the_rules() -> None:
    check_choice_with_rules("cpu", 40, Guards(), seed=3)
