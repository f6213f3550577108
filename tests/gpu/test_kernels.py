"""Tests of the Triton kernels on a GPU: the cases of tests/kernels at real sizes in bf16, fp16 and fp32."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Sequence, check_tree_attention
from cache_cases import check_kv_compact, check_kv_store
from guards import Guards
from sampling_cases import (
    check_argmax_of_many_rows,
    check_choose_tokens,
    check_gumbel_noise,
    check_poisoned_rows,
    check_select_beam,
    check_topk_expand,
)
from tree_cases import check_tree_build, check_verify_tree

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PADS = [64, 67]  # Buffers with the usual alignment, and at odd addresses.


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "dim", "page_size"), [(1, 8, 128, 16), (300, 3, 5, 1), (77, 2, 80, 3)]
)
def test_kv_store(dtype: torch.dtype, rows: int, kv_heads: int, dim: int, page_size: int) -> None:
    check_kv_store("cuda", dtype, rows, kv_heads, dim, page_size, pages=400, guards=Guards(64))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("bs", "columns"), [(1, 8), (5, 64), (3, 128)])
def test_kv_compact(page_size: int, bs: int, columns: int) -> None:
    wide = [(torch.bfloat16, 1024)] * 6 + [(torch.bfloat16, 4096)]
    check_kv_compact("cuda", bs, columns, page_size, wide, Guards(64))
    check_kv_compact("cuda", bs, columns, page_size, wide, Guards(64), with_table_rows=True)
    check_kv_compact("cuda", bs, columns, page_size, [(torch.float32, 6), (torch.bfloat16, 5)], Guards(67))


# Shapes run in bf16. Other dtypes run only where the generated code differs, since each takes a compilation.
@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize(
    ("dtype", "page_size", "dim", "heads", "kv_heads"),
    [
        (BF16, 16, 128, 32, 8), (BF16, 1, 64, 4, 4), (BF16, 3, 80, 6, 2), (BF16, 16, 32, 8, 1),
        (BF16, 16, 24, 5, 1),
        (F32, 16, 128, 32, 8), (F32, 3, 80, 6, 2), (F16, 16, 128, 32, 8),
    ],
)  # fmt: skip
def test_tree_attention(
    tree: bool, dtype: torch.dtype, page_size: int, dim: int, heads: int, kv_heads: int
) -> None:
    sequences = [Sequence(0, 5), Sequence(700, 64), Sequence(37, 1), Sequence(129, 33), Sequence(3, 2)]
    check_tree_attention(
        "cuda",
        dtype,
        sequences,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        page_size=page_size,
        tree=tree,
        guards=Guards(64),
        spare_rows=2,
    )


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize(("dim", "rows"), [(128, 4), (128, 6), (256, 4), (256, 9), (64, 3)])
def test_attention_of_batches_with_few_rows(tree: bool, dim: int, rows: int) -> None:
    """Covers every split of a batch: many programs, few programs that merge their results, or no split."""
    for bs in (1, 2, 4, 16, 40):
        sequences = [Sequence((97 * index) % 700, 1 + index % rows) for index in range(bs - 1)] + [
            Sequence(700, rows)
        ]
        check_tree_attention(
            "cuda", BF16, sequences, heads=32, kv_heads=8, dim=dim, page_size=16, tree=tree, guards=Guards(64)
        )


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_over_many_mask_columns_prefill_and_window(dtype: torch.dtype) -> None:
    shape = {"heads": 8, "kv_heads": 2, "dim": 64, "page_size": 16, "guards": Guards(67)}
    check_tree_attention("cuda", dtype, [Sequence(21, 8, 300), Sequence(0, 3, 5)], tree=True, **shape)
    check_tree_attention("cuda", dtype, [Sequence(0, 513), Sequence(100, 200)], tree=False, **shape)
    check_tree_attention("cuda", dtype, [Sequence(9, 20, 70)] * 2, tree=True, mask_words=1, **shape)
    for tree in (True, False):
        check_tree_attention(
            "cuda", dtype, [Sequence(300, 12), Sequence(2, 4)], tree=tree, window=90, **shape
        )
        check_tree_attention(
            "cuda", dtype, [Sequence(300, 12), Sequence(2, 4)], tree=tree, softcap=5.0, **shape
        )
        check_tree_attention(
            "cuda", dtype, [Sequence(300, 70), Sequence(2, 40)], tree=tree, window=4, chain=True, **shape
        )


@pytest.mark.parametrize(("rows", "vocab", "subset"), [(1, 1, 1), (64, 128256, 32000), (5, 66, 66)])
def test_gumbel_noise(rows: int, vocab: int, subset: int) -> None:
    check_gumbel_noise("cuda", rows, vocab, subset, Guards(64))


@pytest.mark.parametrize(
    ("dtype", "temperatures"),
    [
        (BF16, [0.0] * 33),
        (BF16, [1.0]),
        *((dtype, [0.0, 1.0, 0.7, 0.0, 2.0] * 7) for dtype in (F32, BF16, F16)),
    ],
    ids=["bf16-greedy", "bf16-sampled", "fp32-mixed", "bf16-mixed", "fp16-mixed"],
)
def test_choose_tokens(dtype: torch.dtype, temperatures: list[float]) -> None:
    check_choose_tokens("cuda", dtype, temperatures, 128256, filters=False, guards=Guards(64))
    check_choose_tokens("cuda", dtype, temperatures, 4099, filters=False, guards=Guards(67))
    check_choose_tokens("cuda", dtype, [*temperatures, 1.0], 5003, filters=True, guards=Guards(64))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_argmax_of_many_rows(dtype: torch.dtype) -> None:
    check_argmax_of_many_rows("cuda", dtype, 512, 128256, Guards(64))
    check_argmax_of_many_rows("cuda", dtype, 64, 8193, Guards(67))


@pytest.mark.parametrize(("temperature", "filters"), [(0.0, False), (1.0, False), (1.0, True)])
def test_poisoned_rows(temperature: float, filters: bool) -> None:
    check_poisoned_rows("cuda", 4100, temperature=temperature, filters=filters, guards=Guards(64))


@pytest.mark.parametrize(
    ("dtype", "rows", "vocab", "topk"),
    [
        (BF16, 8, 32000, 8),
        (BF16, 4, 128256, 4),
        (BF16, 5, 130, 16),
        (BF16, 1, 9, 9),
        (F32, 4, 32000, 8),
        (F16, 5, 130, 16),
    ],
)
@pytest.mark.parametrize(("coupled", "mapped"), [(False, False), (True, True)])
def test_topk_expand(
    dtype: torch.dtype, rows: int, vocab: int, topk: int, coupled: bool, mapped: bool
) -> None:
    check_topk_expand("cuda", dtype, rows, vocab, topk, coupled=coupled, mapped=mapped, guards=Guards(64))


@pytest.mark.parametrize(("bs", "candidates", "topk"), [(1, 1, 1), (64, 64, 8), (5, 81, 9), (3, 256, 16)])
def test_select_beam(bs: int, candidates: int, topk: int) -> None:
    check_select_beam("cuda", bs, candidates, topk, Guards(64))


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize(
    ("bs", "depth", "topk", "columns"),
    [
        (1, 5, 8, 32),
        (5, 4, 3, 12),
        (3, 6, 8, 128),
        (2, 5, 5, 70),
        (2, 2, 2, 40),
        (1, 6, 1, 7),
        (2, 15, 16, 128),
    ],
)
def test_tree_build(pad: int, bs: int, depth: int, topk: int, columns: int) -> None:
    check_tree_build("cuda", bs, depth, topk, columns, Guards(pad))


@pytest.mark.parametrize("columns", [1, 7, 64, 128])
@pytest.mark.parametrize("bs", [1, 5])
def test_verify_tree(bs: int, columns: int) -> None:
    check_verify_tree("cuda", bs, columns, Guards(64))
