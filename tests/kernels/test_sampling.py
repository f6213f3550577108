"""philox, choose_tokens and topk_expand: interpreted Triton versions equal the references.

The Triton versions also stay in their buffers.
"""

import pytest
import torch
from guards import Guards
from sampling_cases import (
    check_argmax_of_many_rows,
    check_choose_tokens,
    check_gumbel_noise,
    check_poisoned_rows,
    check_select_beam,
    check_topk_expand,
)

MIXED = [0.0, 1.0, 0.7, 0.0, 2.0]


@pytest.mark.parametrize(("rows", "vocab", "subset"), [(1, 1, 1), (3, 1030, 77), (5, 66, 66)])
def test_noise_is_that_of_the_reference(rows: int, vocab: int, subset: int) -> None:
    check_gumbel_noise("cpu", rows, vocab, subset, Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 4099])
@pytest.mark.parametrize("temperatures", [[0.0] * 3, [1.0], MIXED], ids=["greedy", "sampled", "mixed"])
def test_choose_tokens_equals_the_reference(
    dtype: torch.dtype, vocab: int, temperatures: list[float]
) -> None:
    check_choose_tokens("cpu", dtype, temperatures, vocab, filters=False, guards=Guards())


@pytest.mark.parametrize("vocab", [5, 300])
def test_choose_tokens_with_filters_equals_the_reference(vocab: int) -> None:
    check_choose_tokens(
        "cpu", torch.float32, [*MIXED, 1.0, 1.0, 0.3, 1.5, 1.0, 1.2], vocab, filters=True, guards=Guards()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [8193, 20000])
def test_argmax_of_many_rows_equals_the_reference(dtype: torch.dtype, vocab: int) -> None:
    check_argmax_of_many_rows("cpu", dtype, 64, vocab, Guards())


@pytest.mark.parametrize(("temperature", "filters"), [(0.0, False), (1.0, False), (1.0, True)])
def test_poisoned_rows_fail_alone(temperature: float, filters: bool) -> None:
    check_poisoned_rows("cpu", 4100, temperature=temperature, filters=filters, guards=Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab", "topk"), [(1, 9, 9), (4, 4200, 4), (5, 130, 16), (2, 64, 1)])
@pytest.mark.parametrize(("coupled", "mapped"), [(False, False), (True, True)])
def test_topk_expand_equals_the_reference(
    dtype: torch.dtype, rows: int, vocab: int, topk: int, coupled: bool, mapped: bool
) -> None:
    check_topk_expand("cpu", dtype, rows, vocab, topk, coupled=coupled, mapped=mapped, guards=Guards())


@pytest.mark.parametrize(("bs", "candidates", "topk"), [(1, 1, 1), (3, 16, 4), (5, 81, 9)])
def test_select_beam_equals_the_reference(bs: int, candidates: int, topk: int) -> None:
    check_select_beam("cpu", bs, candidates, topk, Guards())
