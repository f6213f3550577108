"""kv_store and kv_compact: the interpreted Triton versions equal the references and stay in their buffers."""

import pytest
import torch
from cache_cases import check_kv_compact, check_kv_store
from guards import Guards

from outrider.kernels.kv_compact import kv_compact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "dim", "page_size"), [(1, 1, 32, 16), (7, 3, 5, 1), (5, 2, 80, 3)]
)
def test_kv_store_writes_the_named_slots_only(
    dtype: torch.dtype, rows: int, kv_heads: int, dim: int, page_size: int
) -> None:
    check_kv_store("cpu", dtype, rows, kv_heads, dim, page_size, pages=8, guards=Guards())


@pytest.mark.parametrize("with_table_rows", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("bs", "columns"), [(1, 2), (3, 8), (5, 33)])
def test_kv_compact_moves_accepted_rows(page_size: int, bs: int, columns: int, with_table_rows: bool) -> None:
    widths = [(torch.float32, 6), (torch.bfloat16, 5), (torch.float32, 40)]
    check_kv_compact("cpu", bs, columns, page_size, widths, Guards(), with_table_rows=with_table_rows)


def test_kv_compact_needs_a_table_row_of_every_sequence() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="table_rows has 1 entries, fewer than the 2 rows of path"):
        kv_compact([torch.zeros(1, 4, 1)], ints[:, None], ints, ints[:, None], ints, ints[:1])


def test_kv_compact_moves_wide_rows_of_one_dtype() -> None:
    check_kv_compact("cpu", 2, 16, 4, [(torch.float32, 260), (torch.float32, 260)], Guards(pad=64))
