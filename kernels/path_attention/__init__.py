"""path_attention: batch-invariant attention of each row to its own history, read in token order.

A row may be a tree node, the row of a plain decode step, or a row of a prompt chunk. Equal histories may
therefore be stored in different KV slots. This op reads a history in token order, in blocks of fixed size
from token 0 on. It adds the blocks in that order. Rows with equal histories therefore get equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.path_attention import reference

__all__ = ["RowPaths", "path_attention", "row_paths"]


@dataclass(frozen=True, slots=True)
class RowPaths:
    """Location in the KV cache of each row's history: the tokens that the row attends to.

    Let p be the row's entry in `prefix_lens`. If j < p, token j of the history is at token index j of the
    row's sequence. Otherwise, it is at token index ``p + columns[row, j - p]``.

    Attributes:
        sequences: ``[rows] int32``, row of the page table that belongs to each row's sequence.
        prefix_lens: ``[rows] int32``, number of history tokens before the row's tree nodes. For causal rows,
            this is the full length.
        lengths: ``[rows] int32``, number of tokens that each row sees, its own token included.
        columns: ``[rows, width] int32``, nodes of the row's path, root first.
    """

    sequences: torch.Tensor
    prefix_lens: torch.Tensor
    lengths: torch.Tensor
    columns: torch.Tensor


def row_paths(
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    ancestors: torch.Tensor | None,
    rows: int,
    table_rows: torch.Tensor | None = None,
) -> RowPaths:
    """Find the history of each row of a step: the tokens that the row attends to. No work runs on the host.

    Args:
        prefix_lens: ``[bs] int32``, prefix lengths, as in `tree_attention`.
        kv_lens: ``[bs] int32``, numbers of cached tokens, as in `tree_attention`.
        query_start: ``[bs + 1] int32``, first row of each sequence, as in `tree_attention`.
        ancestors: ``[rows, words] int32`` ancestor masks, or None for causal rows.
        rows: Number of rows of the step. Rows after those of the last sequence have no history.
        table_rows: ``[bs] int32``, row of the page table that belongs to each sequence. The rows of a
            sequence with -1 have no history. With None, sequence b uses row b.

    Returns:
        The location of each row's history.

    Example:
        A root and its two children follow a prefix of two tokens. Each row sees only the prefix and its own
        path.

        >>> import torch
        >>> from outrider.kernels.path_attention import row_paths
        >>> prefix, kv = torch.tensor([2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
        >>> starts = torch.tensor([0, 3], dtype=torch.int32)
        >>> ancestors = torch.tensor([[0b001], [0b011], [0b101]], dtype=torch.int32)
        >>> paths = row_paths(prefix, kv, starts, ancestors, 3)
        >>> paths.lengths.tolist()
        [3, 4, 4]
        >>> paths.columns[2, :2].tolist()  # row 2 sees the root and itself
        [0, 2]
    """
    row = torch.arange(rows, dtype=torch.int32, device=query_start.device)
    sequence = torch.searchsorted(query_start[1:].contiguous(), row, right=True).clamp(
        max=query_start.shape[0] - 2
    )
    ends = torch.where(row < query_start[-1], kv_lens[sequence], 0)
    owners = sequence.to(torch.int32)
    if table_rows is not None:
        owners = table_rows[sequence]
        ends = torch.where(owners < 0, 0, ends)
        owners = owners.clamp(min=0)
    if ancestors is None:
        lengths = torch.where(ends > 0, ends - query_start[sequence + 1] + row + 1, 0)
        lengths = lengths.clamp(min=0).to(torch.int32)
        return RowPaths(
            owners,
            lengths,
            lengths,
            torch.zeros((rows, 1), dtype=torch.int32, device=row.device),
        )
    width = 32 * ancestors.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=row.device)
    bits = ((ancestors[:, :, None] >> shifts) & 1).flatten(1)  # [rows, width]
    prefix = torch.minimum(prefix_lens[sequence], ends)
    column = torch.arange(width, dtype=torch.int32, device=row.device)
    counts = torch.where(column < (ends - prefix)[:, None], bits, 0).cumsum(1, dtype=torch.int32)
    # The k-th node of a path is the first column up to which k + 1 bits are set.
    wanted = (column + 1).expand(rows, -1).contiguous()
    columns = torch.searchsorted(counts, wanted).to(torch.int32)
    return RowPaths(owners, prefix, prefix + counts[:, -1], columns)


def path_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    paths: RowPaths,
    *,
    scale: float,
    max_kv_len: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend from each row to its own history, accumulating in fp32.

    Args:
        q: ``[rows, heads, dim]`` fp32/bf16/fp16.
        k_plane: ``[pages, page_size, kv_heads, dim]``, contiguous, in q's dtype or in FP8. FP8 values are
            widened to q's dtype as they are read. heads is a multiple of kv_heads.
        v_plane: Like `k_plane`.
        page_table: ``[bs, max_pages] int32``, the pages of each sequence in token order.
        paths: Result of `row_paths`.
        scale: Factor on the scores.
        max_kv_len: Upper bound of ``paths.lengths``, known on the host.
        window: If above 0, a row sees only the last `window` tokens of its history.
        sinks: ``[heads] fp32``, a logit per head that takes part in the softmax but has no V row. With None,
            there are no sinks.
        softcap: If above 0, scaled scores s become ``softcap * tanh(s / softcap)``; sinks are not capped.

    Returns:
        ``[rows, heads, dim]`` in q's dtype; zeros for rows that see nothing.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        A root and its two children follow a prefix of one token. Because all queries are zero, the result of
        each row is the mean of the values in its history.

        >>> import torch
        >>> from outrider.kernels.path_attention import path_attention, row_paths
        >>> prefix, kv = torch.tensor([1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        >>> starts = torch.tensor([0, 3], dtype=torch.int32)
        >>> ancestors = torch.tensor([[0b001], [0b011], [0b101]], dtype=torch.int32)
        >>> paths = row_paths(prefix, kv, starts, ancestors, 3)
        >>> planes = torch.tensor([0.0, 2.0, 4.0, 10.0]).view(1, 4, 1, 1)  # one page of four tokens
        >>> table = torch.zeros(1, 1, dtype=torch.int32)
        >>> out = path_attention(torch.zeros(3, 1, 1), planes, planes, table, paths, scale=1.0, max_kv_len=4)
        >>> out.flatten().round(decimals=3)
        tensor([1., 2., 4.])
    """
    rows, heads, dim = q.shape
    expect("k_plane", k_plane, (None, None, None, dim))
    expect("v_plane", v_plane, tuple(k_plane.shape), k_plane.dtype)
    if heads % k_plane.shape[2]:
        raise ValueError(
            f"q has {heads} heads, which is not a multiple of the {k_plane.shape[2]} heads of k_plane"
        )
    expect_contiguous("k_plane", k_plane)
    expect_contiguous("v_plane", v_plane)
    expect("page_table", page_table, (None, None), torch.int32)
    expect("paths.sequences", paths.sequences, (rows,), torch.int32)
    expect("paths.prefix_lens", paths.prefix_lens, (rows,), torch.int32)
    expect("paths.lengths", paths.lengths, (rows,), torch.int32)
    expect("paths.columns", paths.columns, (rows, None), torch.int32)
    if sinks is not None:
        expect("sinks", sinks, (heads,), torch.float32)
    version = reference.path_attention
    if use_triton(q):
        from outrider.kernels.path_attention import triton as compiled

        version = compiled.path_attention
    return version(
        q, k_plane, v_plane, page_table, paths.sequences, paths.prefix_lens, paths.lengths, paths.columns,
        sinks,
        scale=scale, max_kv_len=max_kv_len, window=window, softcap=softcap,
    )  # fmt: skip
