"""Statistics of tensors: recognising d2t by its values, untrained tensors by distribution, single NaNs."""

from __future__ import annotations

import pytest
import torch

from outrider.services.doctor.statistics import is_finite, tensor_statistics
from outrider.services.doctor.vocabulary_map import D2tMeaning, d2t_meaning

torch.set_num_threads(1)
VOCAB = 40


def test_offsets_and_target_ids_are_told_apart_by_value() -> None:
    kept = torch.tensor([2, 3, 7, 20, 21, 39])
    offsets = kept - torch.arange(6)
    mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    assert d2t_meaning(offsets, None, VOCAB) is D2tMeaning.OFFSETS
    assert d2t_meaning(kept, None, VOCAB) is D2tMeaning.TARGET_IDS
    assert d2t_meaning(offsets, mask, VOCAB) is D2tMeaning.OFFSETS
    assert d2t_meaning(kept, mask, VOCAB) is D2tMeaning.TARGET_IDS
    assert d2t_meaning(kept + 1, mask, VOCAB) is D2tMeaning.NEITHER
    assert d2t_meaning(torch.tensor([-1, 0]), None, VOCAB) is D2tMeaning.NEITHER


def test_a_map_that_can_be_both_is_settled_by_its_mask_only() -> None:
    both = torch.tensor([0, 2, 4, 6])  # ids 0 2 4 6, or offsets that mean 0 3 6 9
    assert d2t_meaning(both, None, VOCAB) is D2tMeaning.EITHER
    for ids, meaning in (([0, 2, 4, 6], D2tMeaning.TARGET_IDS), ([0, 3, 6, 9], D2tMeaning.OFFSETS)):
        mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
        assert d2t_meaning(both, mask, VOCAB) is meaning


@pytest.mark.parametrize(
    ("tensor", "look"),
    [
        (torch.randn(512, 256, generator=torch.Generator().manual_seed(0)) * 0.02, "normal, std 0.02"),
        ((torch.rand(512, 256, generator=torch.Generator().manual_seed(1)) - 0.5) / 8, "uniform"),
        (
            torch.randn(512, 256, generator=torch.Generator().manual_seed(2))
            * torch.linspace(0.5, 2, 512)[:, None],
            "",
        ),
        (torch.randn(512, 256, generator=torch.Generator().manual_seed(3)).pow(3), ""),
        (torch.zeros(512, 256), ""),
        (torch.randn(8, 8), ""),
    ],
    ids=["normal", "uniform", "rows of different size", "heavy tails", "zeros", "too small to tell"],
)
def test_an_initialisation_is_known_by_its_distribution(tensor: torch.Tensor, look: str) -> None:
    assert tensor_statistics(tensor, whole=True).looks_initialised.startswith(look)
    assert bool(tensor_statistics(tensor, whole=True).looks_initialised) == bool(look)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_one_nan_among_many_numbers_is_found(dtype: torch.dtype) -> None:
    tensor = torch.ones(300, 7)
    assert is_finite(tensor.to(dtype))
    tensor[123, 4] = float("nan")
    assert not is_finite(tensor.to(dtype))
