"""kv_compact: after verification, move the accepted nodes' rows to the committed slots, in every plane."""

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
) -> None:
    """Move the row of token index ``cached_lens[b] + path[b, i]`` to ``cached_lens[b] + i`` for i in 0..num_accepted[b], in place.

    Every source is loaded before anything is stored: a destination can be a later source. Rows with ``path[b, i] < 0`` stay where they are.

    Args:
        planes: Tensors ``[pages, page_size, ...]``, contiguous, all with the same pages and page_size; K, V and feature planes of
            any dtype.
        page_table: ``[bs, max_pages] int32``, the pages of each sequence in token order.
        cached_lens: ``[bs] int32``; tree node n of sequence b sits at token index ``cached_lens[b] + n``.
        path: ``[bs, N] int32``, what `verify_tree` returns: node indices, root first, -1 padded; rows may be strided. No sequence accepts
            N nodes or more.
        num_accepted: ``[bs] int32``, accepted drafts, the root excluded; -1 leaves the sequence alone.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    bs = page_table.shape[0]
    expect("page_table", page_table, (bs, None), torch.int32)
    expect("cached_lens", cached_lens, (bs,), torch.int32)
    expect("path", path, (bs, None), torch.int32)
    expect("num_accepted", num_accepted, (bs,), torch.int32)
    for i, plane in enumerate(planes):
        if plane.shape[:2] != planes[0].shape[:2]:
            raise ValueError(
                f"planes[{i}] has {list(plane.shape[:2])} pages and page_size, planes[0] has {list(planes[0].shape[:2])}"
            )
        expect_contiguous(f"planes[{i}]", plane)
    if not planes or bs == 0:
        return
    if use_triton(planes[0]):
        from outrider.kernels.kv_compact import triton as compiled

        compiled.kv_compact(planes, page_table, cached_lens, path, num_accepted)
    else:
        reference.kv_compact(planes, page_table, cached_lens, path, num_accepted)
