"""kv_compact: after verification, moves the accepted nodes' rows to the committed slots in every plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.kv_compact import reference

__all__ = ["kv_compact"]


def kv_compact(
    planes: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    cached_lens: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    table_rows: torch.Tensor | None = None,
) -> None:
    """Move the cached rows of accepted tree nodes to consecutive token indices, in place.

    For every i in 0..num_accepted[b], the row of sequence b at token index ``cached_lens[b] + path[b, i]``
    moves to ``cached_lens[b] + i``. All sources are loaded before anything is stored, because a destination
    may be the source of a later move. Entries with ``path[b, i] < 0`` move nothing.

    Args:
        planes: Planes of the KV cache to change, such as K, V and features: contiguous tensors
            ``[pages, page_size, ...]`` of any dtype. All have the same number of pages and the same
            page_size.
        page_table: ``[tables, max_pages] int32``, the pages of each sequence in token order. Without
            `table_rows`, row b belongs to sequence b.
        cached_lens: ``[bs] int32``; tree node n of sequence b is at token index ``cached_lens[b] + n``. With
            `table_rows`, entries from bs on are allowed and ignored.
        path: ``[bs, N] int32`` as returned by `verify_tree`: indices of the root and the accepted nodes,
            padded with -1. Rows may be strided. At most N - 1 drafts are accepted.
        num_accepted: ``[bs] int32``, number of accepted drafts, the root excluded. -1 leaves the sequence
            unchanged.
        table_rows: ``[bs] int32``, the row of `page_table` of each sequence, or None; -1 leaves the sequence
            unchanged. Entries from bs on are ignored.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        One sequence has a cached token (10) and a tree of three nodes (20, 21, 22). The path accepts the root
        and node 2, so the row of node 2 moves to the index after the root's.

        >>> import torch
        >>> from outrider.kernels.kv_compact import kv_compact
        >>> plane = torch.tensor([[[10.0], [20.0], [21.0], [22.0]]])  # one page of four tokens
        >>> table, cached = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        >>> path, accepted = torch.tensor([[0, 2, -1]]).int(), torch.tensor([1]).int()
        >>> kv_compact([plane], table, cached, path, accepted)
        >>> plane.flatten()
        tensor([10., 20., 22., 22.])
    """
    bs = path.shape[0]
    expect("path", path, (bs, None), torch.int32)
    if table_rows is None:
        expect("page_table", page_table, (bs, None), torch.int32)
        expect("cached_lens", cached_lens, (bs,), torch.int32)
    else:
        expect("page_table", page_table, (None, None), torch.int32)
        for name, tensor in (("cached_lens", cached_lens), ("table_rows", table_rows)):
            expect(name, tensor, (None,), torch.int32)
            if tensor.shape[0] < bs:
                raise ValueError(f"{name} has {tensor.shape[0]} entries, fewer than the {bs} rows of path")
    expect("num_accepted", num_accepted, (bs,), torch.int32)
    for i, plane in enumerate(planes):
        if plane.shape[:2] != planes[0].shape[:2]:
            raise ValueError(
                f"planes[{i}] has {list(plane.shape[:2])} pages and page_size, "
                f"but planes[0] has {list(planes[0].shape[:2])}"
            )
        expect_contiguous(f"planes[{i}]", plane)
    if not planes or bs == 0:
        return
    if use_triton(planes[0]):
        from outrider.kernels.kv_compact import triton as compiled

        compiled.kv_compact(planes, page_table, cached_lens, path, num_accepted, table_rows)
    else:
        reference.kv_compact(planes, page_table, cached_lens, path, num_accepted, table_rows)
