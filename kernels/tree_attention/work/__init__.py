"""plan_attention: cuts the K/V of a ragged batch into shares for `tree_attention`, on the device.

In a ragged batch, sequences have different numbers of rows and tokens, and these numbers are stored on the
device only. A work list therefore assigns each program its block of rows and its token indices. The size of
the grid depends only on the number of rows. The run time depends on the actual number of tokens. A uniform
batch needs no work list, because its shares follow from numbers that the host knows.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, next_power_of_2
from outrider.kernels.tree_attention.limits import has_room, processors
from outrider.kernels.tree_attention.work import reference
from outrider.kernels.tree_attention.work.types import WorkList, choose_work

__all__ = ["WorkList", "plan_attention"]


def plan_attention(
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    prefix_lens: torch.Tensor,
    table_rows: torch.Tensor | None = None,
    *,
    rows: int,
    max_query_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    plane_dtype: torch.dtype | None = None,
) -> WorkList:
    """Cut every sequence's tokens into shares that fill the GPU about evenly.

    The shares depend on the lengths alone, so results do not depend on timing. All shares have about the same
    size: a sequence of 32,000 tokens among short ones is cut into many shares, and the short ones stay whole.

    The function never waits for the device and may be captured into a CUDA graph. Kernels that are launched
    later may read the work list before they wait for their previous kernel (``gdc_wait``).

    Args:
        kv_lens: ``[bs] int32``, number of cached tokens of each sequence, including those of this step. A
            sequence with 0 tokens is idle.
        query_start: ``[bs + 1] int32``; the rows of sequence b are ``query_start[b]:query_start[b + 1]``. A
            sequence may have no rows.
        prefix_lens: ``[bs] int32``, as in `tree_attention`.
        table_rows: ``[bs] int32``, row of the page table that belongs to each sequence, or -1 for an idle
            sequence. With None, sequence b uses row b.
        rows: Number of rows of the step, including rows that belong to no sequence.
        max_query_len: Upper bound of the number of rows of a sequence, known on the host.
        heads: Query heads, a multiple of kv_heads.
        kv_heads: Number of K/V heads.
        dim: Width of a head.
        dtype: Type of the queries.
        plane_dtype: Type of the cached K and V; `dtype` if None.

    Returns:
        The work list for `tree_attention`. All layers with these heads and types can use the same list.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, or heads is not a multiple of kv_heads.

    Example:
        Three sequences have 300, 0 and 40 tokens, and one row each. The idle sequence also has an item,
        because its row must be set to zeros.

        >>> import torch
        >>> from outrider.kernels.tree_attention import plan_attention
        >>> lens = torch.tensor([300, 0, 40], dtype=torch.int32)
        >>> starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
        >>> work = plan_attention(
        ...     lens, starts, lens, rows=3, max_query_len=1, heads=4, kv_heads=1, dim=64, dtype=torch.bfloat16
        ... )
        >>> work.items[:5, [0, 6, 7]].tolist()  # first row, and range of token indices
        [[0, 0, 128], [0, 128, 256], [0, 256, 300], [1, 0, 0], [2, 0, 40]]
    """
    bs = kv_lens.shape[0]
    expect("kv_lens", kv_lens, (bs,), torch.int32)
    expect("query_start", query_start, (bs + 1,), torch.int32)
    expect("prefix_lens", prefix_lens, (bs,), torch.int32)
    if table_rows is not None:
        expect("table_rows", table_rows, (bs,), torch.int32)
    if heads % kv_heads:
        raise ValueError(f"heads is {heads}, which is not a multiple of kv_heads, {kv_heads}")
    sizes = choose_work(
        bs,
        rows,
        max_query_len,
        heads // kv_heads,
        kv_heads,
        max(16, next_power_of_2(dim)),
        dtype.itemsize,
        processors(kv_lens.device),
        plane_dtype in (None, dtype) and has_room(kv_lens.device),
    )
    version = reference.plan_attention
    if use_triton(kv_lens):
        from outrider.kernels.tree_attention.work import triton as compiled

        version = compiled.plan_attention
    return version(kv_lens, query_start, prefix_lens, table_rows, sizes)
