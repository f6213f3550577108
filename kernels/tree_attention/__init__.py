"""tree_attention: attention over paged K/V with an ancestor mask per row.

Prefill, extend and plain decoding use the causal form, which has no mask.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._fp8 import FP8
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.tree_attention import reference
from outrider.kernels.tree_attention.work import WorkList, plan_attention

__all__ = ["WorkList", "plan_attention", "tree_attention"]


def tree_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    ancestors: torch.Tensor | None,
    *,
    scale: float,
    max_query_len: int,
    max_kv_len: int,
    window: int = 0,
    row_positions: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    table_rows: torch.Tensor | None = None,
    work: WorkList | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from packed query rows to the K/V of their own sequence, accumulating in fp32.

    With `ancestors` (tree rows), a row of sequence b sees every token index below ``prefix_lens[b]``. The row
    also sees the columns whose bit is set in the row's mask. Column j is token index ``prefix_lens[b] + j``,
    which must be below ``kv_lens[b]`` to be seen.

    Without `ancestors`, rows are causal, and `prefix_lens` is not read. Row i of the q_len rows of sequence b
    sees token indices up to ``kv_lens[b] - q_len + i``.

    A row that sees nothing yields zeros. Rows of an idle sequence see nothing.

    Without a work list (`work`), the grid is sized for sequences of `max_query_len` rows and `max_kv_len`
    tokens. With a work list, the cost of each sequence depends on its own rows and tokens.

    Args:
        q: ``[rows, heads, dim]`` fp32/bf16/fp16; any strides with a dense last dimension.
        k_plane: ``[pages, page_size, kv_heads, dim]``, contiguous, in q's dtype or in e4m3. e4m3 values are
            widened as they are read. heads is a multiple of kv_heads.
        v_plane: Like `k_plane`.
        page_table: ``[table rows, max_pages] int32``, pages of each sequence in token order. At least
            ``ceil(kv_len / page_size)`` pages of each sequence are valid. If `table_rows` is None, the page
            table has bs rows.
        prefix_lens: ``[bs] int32``, number of tokens before each sequence's columns.
        kv_lens: ``[bs] int32``, number of cached tokens, including those of this step.
        query_start: ``[bs + 1] int32``; the rows of sequence b are ``query_start[b]:query_start[b + 1]``.
        ancestors: ``[rows, words] int32`` or None. Bit j % 32 of word j // 32 is column j; columns
            beyond the last word are hidden.
        scale: Positive factor on the scores, usually dim ** -0.5.
        max_query_len: Upper bound of the number of rows of a sequence, known on the host. This
            bound determines the grid.
        max_kv_len: Upper bound of kv_lens, known on the host.
        window: If above 0, a row at position p sees only positions above p - window. On a tree row's path,
            the op takes the last `window` nodes in the order of columns. The column of an ancestor must
            therefore precede the columns of its descendants.
        row_positions: ``[rows] int32``, position p of each tree row. If None, p is the row's prefix length
            plus the number of bits set in the row's mask, its own bit excluded. Not used for causal rows.
        sinks: ``[heads] fp32``, a logit per head that takes part in the softmax but has no V row. With None,
            there are no sinks.
        softcap: If above 0, scaled scores s become ``softcap * tanh(s / softcap)`` before the mask; sinks are
            not capped.
        table_rows: ``[bs] int32``, row of `page_table` that belongs to each sequence, or -1 for an idle
            sequence. With None, sequence b uses row b.
        work: Result of `plan_attention` for the same lengths, rows, `table_rows`, heads and types, or None.
        out: ``[rows, heads, dim]``, contiguous, in q's dtype; allocated if None. Rows that belong to no
            sequence are not written.

    Returns:
        `out`.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        A root and its two children follow a prefix of one token. With queries of zeros, each row returns the
        mean of the values it sees. The second child does not see the first.

        >>> import torch
        >>> from outrider.kernels.tree_attention import tree_attention
        >>> planes = torch.tensor([0.0, 2.0, 4.0, 10.0]).view(1, 4, 1, 1)  # one page of four tokens
        >>> table = torch.zeros(1, 1, dtype=torch.int32)
        >>> prefix, kv = torch.tensor([1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        >>> starts = torch.tensor([0, 3], dtype=torch.int32)
        >>> ancestors = torch.tensor([[0b001], [0b011], [0b101]], dtype=torch.int32)
        >>> out = tree_attention(
        ...     torch.zeros(3, 1, 1), planes, planes, table, prefix, kv, starts, ancestors,
        ...     scale=1.0, max_query_len=3, max_kv_len=4,
        ... )
        >>> out.flatten().round(decimals=3)
        tensor([1., 2., 4.])
    """
    rows, heads, dim = q.shape
    bs = kv_lens.shape[0]
    expect("k_plane", k_plane, (None, None, None, dim), None if k_plane.dtype is FP8 else q.dtype)
    expect("v_plane", v_plane, tuple(k_plane.shape), k_plane.dtype)
    if heads % k_plane.shape[2]:
        raise ValueError(
            f"q has {heads} heads, which is not a multiple of the {k_plane.shape[2]} heads of k_plane"
        )
    expect("page_table", page_table, (bs if table_rows is None else None, None), torch.int32)
    expect("prefix_lens", prefix_lens, (bs,), torch.int32)
    expect("kv_lens", kv_lens, (bs,), torch.int32)
    expect("query_start", query_start, (bs + 1,), torch.int32)
    if ancestors is not None:
        expect("ancestors", ancestors, (rows, None), torch.int32)
    if sinks is not None:
        expect("sinks", sinks, (heads,), torch.float32)
    if table_rows is not None:
        expect("table_rows", table_rows, (bs,), torch.int32)
    if work is not None:
        _expect_same(work, rows, heads, k_plane.shape[2])
    expect_contiguous("k_plane", k_plane)
    expect_contiguous("v_plane", v_plane)
    if out is None:
        out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    else:
        expect("out", out, (rows, heads, dim), q.dtype)
        expect_contiguous("out", out)
    version = reference.tree_attention
    if use_triton(q):
        from outrider.kernels.tree_attention import triton as compiled

        version = compiled.tree_attention
    version(
        q, k_plane, v_plane, page_table, prefix_lens, kv_lens, query_start, ancestors, row_positions, sinks,
        table_rows, work, out,
        scale=scale, max_query_len=max_query_len, max_kv_len=max_kv_len, window=window, softcap=softcap,
    )  # fmt: skip
    return out


def _expect_same(work: WorkList, rows: int, heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the work list was made for these rows and heads."""
    planned = work.sizes.rows, work.sizes.group * work.sizes.kv_heads, work.sizes.kv_heads
    if planned != (rows, heads, kv_heads):
        raise ValueError(
            f"work was planned for (rows, heads, kv_heads) {planned}, not {(rows, heads, kv_heads)}; "
            "call plan_attention for this step"
        )
