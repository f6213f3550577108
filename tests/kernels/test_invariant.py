"""Interpreted batch-invariant kernels: near the references, and a row's bits depend only on that row."""

import pytest
import torch
from guards import Guards
from invariant_cases import (
    Histories,
    check_against_tree_attention,
    check_gemm,
    check_gemm_rows,
    check_histories,
    check_norm,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 64, 48), (70, 130, 65), (3, 2048, 40)])
def test_gemm_equals_its_reference(dtype: torch.dtype, rows: int, width: int, out: int) -> None:
    check_gemm("cpu", dtype, rows, width, out, Guards())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 2048])
def test_gemm_gives_a_row_the_same_bits_in_every_batch(dtype: torch.dtype, width: int) -> None:
    check_gemm_rows("cpu", dtype, (1, 3, 66), width, 40)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("size", [16, 100])
def test_norm(size: int, heads: int | None) -> None:
    check_norm("cpu", torch.float32, 5, size, Guards(), heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "nodes"), [(6, 5), (131, 5)])
def test_attention_gives_equal_histories_equal_bits(dtype: torch.dtype, length: int, nodes: int) -> None:
    check_histories("cpu", dtype, length, nodes)


def test_attention_with_a_window_sinks_and_a_cap_gives_equal_bits() -> None:
    check_histories("cpu", torch.float32, 150, 3, window=20, sinks=torch.randn(4), softcap=5.0)


@pytest.mark.parametrize("options", [{"window": 7}, {"window": 140}, {"softcap": 3.0}])
def test_attention_is_tree_attention(options: dict[str, float]) -> None:
    check_against_tree_attention("cpu", torch.float32, **options)
    check_against_tree_attention("cpu", torch.float32, sinks=torch.linspace(-1, 1, 4), **options)


def test_another_history_gives_other_bits() -> None:
    histories = Histories("cpu", torch.float32, 40, 4)
    whole = histories.attend(histories.q, histories.causal(0, 40))
    shorter = histories.attend(histories.q[1:].clone(), histories.causal(0, 39))
    assert not torch.equal(whole[1:], shorter)
