"""filtered_choice: the interpreted Triton version keeps the right tokens and stays in its buffers."""

import pytest
import torch
from filter_cases import (
    check_choices,
    check_kept_tokens,
    check_mixed_choices,
    check_reference,
    check_ties,
    filters_of,
    logits_of,
)
from guards import Guards, triton_version

from outrider.kernels.filtered_choice import triton as search
from outrider.kernels.verify import triton as compiled


@pytest.mark.parametrize(
    ("kind", "dtype", "vocab"),
    [
        ("peaked", torch.float32, 900), ("peaked", torch.bfloat16, 5000), ("flat", torch.float32, 900),
        ("flat", torch.bfloat16, 900),
        ("ties", torch.float32, 5000), ("ties", torch.bfloat16, 900), ("ties", torch.float16, 900),
        ("masked", torch.bfloat16, 900),
    ],
)  # fmt: skip
def test_what_is_kept_is_what_the_law_keeps(kind: str, dtype: torch.dtype, vocab: int) -> None:
    check_kept_tokens(kind, 13, vocab, dtype, "cpu", Guards())


@pytest.mark.parametrize("kind", ["ties", "masked"])
def test_the_reference_keeps_the_same(kind: str) -> None:
    check_reference(kind, 13, 60, torch.float32)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(37, torch.float32), (700, torch.float16), (5000, torch.bfloat16)]
)
def test_equal_logits_are_kept_in_the_order_of_their_ids(vocab: int, dtype: torch.dtype) -> None:
    check_ties(vocab, dtype, "cpu", Guards())


@pytest.mark.parametrize("vocab", [1, 3, 37])
def test_small_vocabularies(vocab: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_kept_tokens("ties", 5, vocab, dtype, "cpu", Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_chosen_as_from_what_sorting_keeps(dtype: torch.dtype) -> None:
    check_choices(70, 8, dtype, "cpu", Guards())


@pytest.mark.parametrize("programs", [3, 1024])
def test_rows_with_and_without_filters_share_a_batch(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_PROGRAMS", programs)
    monkeypatch.setattr(search, "_LISTED", 8)
    check_mixed_choices(29, 5000, torch.bfloat16, "cpu", Guards())
    check_mixed_choices(29, 60, torch.float32, "cpu", Guards())


def test_only_rows_with_a_filter_are_searched() -> None:
    logits, sampling = logits_of("flat", 20, 5000, torch.bfloat16, "cpu"), filters_of(20, "cpu")
    sampling.temperature[::2] = 0.0
    on = (sampling.temperature > 0) & (
        ((sampling.top_k > 0) & (sampling.top_k < 5000)) | (sampling.top_p < 1) | (sampling.min_p > 0)
    )
    rows = on.nonzero().flatten().tolist()
    assert 0 < len(rows) < 10
    with triton_version(Guards()):  # New buffers contain NaN.
        found = search._find(logits, sampling)
    assert found.listed[: len(rows) + 1].tolist() == [len(rows), *rows]
    assert found.best.isfinite().all(1).nonzero().flatten().tolist() == rows


def test_a_search_that_does_not_choose_what_sorting_does_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, right = (torch.device("cpu"), torch.float32, 60), search.best_kept
    assert compiled._agrees(*kind)
    monkeypatch.setattr(
        compiled, "best_kept", lambda logits, sampling, positions: right(logits.flip(1), sampling, positions)
    )
    assert not compiled._agrees(*kind)
