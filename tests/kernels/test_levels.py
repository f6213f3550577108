"""expand_level: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from guards import Guards
from level_cases import check_expand_level
from support.suite.cases import every_pair

SIZES = [
    (1, 40, 3, 4),
    (3, 2100, 4, 3),
    (2, 64, 1, 5),
    (2, 30, 9, 5),
    (1, 8, 8, 1),
    (2, 4500, 3, 3),
    (1, 9000, 1, 3),
    (1, 9000, 5, 3),
    (3, 9000, 8, 2),
]


@pytest.mark.parametrize(
    ("bs", "vocab", "topk", "depth", "dtype", "coupled", "mapped"),
    every_pair(SIZES, [torch.float32, torch.bfloat16, torch.float16], [(False, False), (True, True)]),
)
def test_expand_level_equals_the_reference(
    bs: int,
    vocab: int,
    topk: int,
    depth: int,
    dtype: torch.dtype,
    coupled: bool,
    mapped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some of these sizes have this many.
    monkeypatch.setattr("outrider.kernels.topk_expand.parts.triton.CHUNKED_PROGRAMS", 20)
    check_expand_level("cpu", dtype, bs, vocab, topk, depth, coupled=coupled, mapped=mapped, guards=Guards())
