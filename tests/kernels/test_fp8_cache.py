"""K and V in FP8 under the interpreter: saturated when stored, moved unchanged, widened by attention."""

import pytest
import torch
from fp8_cases import check_attention, check_compact, check_store

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_saturates(dtype: torch.dtype) -> None:
    check_store("cpu", dtype)


def test_compact_moves_bits() -> None:
    check_compact("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_widens(dtype: torch.dtype) -> None:
    check_attention("cpu", dtype)
