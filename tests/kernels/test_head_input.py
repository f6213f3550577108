"""head_input: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from guards import Guards
from input_cases import check_head_input

from outrider.kernels.head_input import Residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("count", "hidden"), [(1, 64), (5, 37)])
@pytest.mark.parametrize(
    ("norms", "residual"),
    [
        ((True, True), Residual.FEATURE),
        ((True, True), Residual.NORMED_FEATURE),
        ((False, False), Residual.FEATURE),
    ],
)
def test_head_input_equals_the_reference(
    dtype: torch.dtype, gathered: bool, count: int, hidden: int, norms: tuple[bool, bool], residual: Residual
) -> None:
    check_head_input(
        "cpu", dtype, count, hidden, norms=norms, gathered=gathered, residual=residual, guards=Guards()
    )
