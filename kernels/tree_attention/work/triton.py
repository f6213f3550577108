"""Triton version of plan_attention: one program. `kernels.tree_attention` documents the ops.

The even size is the number of steps per program if `capacity` programs shared all steps equally. A share is
the part of a sequence's steps that one program does. The size of the shares is chosen in one of two ways:

1. If possible, all programs start together: the size is the smallest one with which all shares fit on the
   device, up to twice the even size.
2. Otherwise, some programs start only when others end. Each sequence is cut into shares of about the even
   size, so that no program ends much later than the others. A sequence of up to 1.5 times the even size stays
   whole, because a merge would cost more than it saves.

In both cases, there are at most `capacity` items for second and later splits. Let W be the even size. A
sequence of p blocks and n steps has at most p * n / W such items, and the sum of p * n / W is at most
`capacity`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from outrider.kernels import _launch
from outrider.kernels.tree_attention.work.types import ITEM, MOST_SPLITS, ROW, WorkList, WorkSizes


@triton.jit(
    do_not_specialize=["bs", "rows", "most", "capacity", "least"],
    do_not_specialize_on_alignment=["query_start"],
)
def _plan_attention(
    kv_lens, query_start, prefix_lens, table_rows, items, merges, bs, rows, most, capacity, least,
    MOST_SPLITS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    ITEM: tl.constexpr, ROW: tl.constexpr, MAPPED: tl.constexpr, MERGES: tl.constexpr, PDL: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_Z: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    sequence = tl.arange(0, BLOCK_B)
    inside = sequence < bs
    start = tl.load(query_start + sequence, mask=inside, other=0)
    q_len = tl.maximum(tl.load(query_start + sequence + 1, mask=inside, other=0) - start, 0)
    kv_len = tl.load(kv_lens + sequence, mask=inside, other=0)
    table_row = sequence
    if MAPPED:
        table_row = tl.load(table_rows + sequence, mask=inside, other=-1)
    kv_len = tl.where((q_len > 0) & (table_row >= 0), tl.maximum(kv_len, 0), 0)
    prefix_len = tl.minimum(tl.load(prefix_lens + sequence, mask=inside, other=0), kv_len)
    blocks = tl.cdiv(q_len * GROUP, PAIRS)
    steps = tl.cdiv(kv_len, TOKENS)

    # 1. Choose the number of splits of each sequence.
    even = tl.maximum(tl.cdiv(tl.sum(blocks * steps, 0), capacity), 1)
    fits = tl.sum(blocks * tl.cdiv(steps, 2 * even), 0) <= capacity
    low = even
    high = tl.where(fits, 2 * even, even)
    while low < high:  # the smallest share that fits
        middle = (low + high) // 2
        enough = tl.sum(blocks * tl.cdiv(steps, middle), 0) <= capacity
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    splits = tl.where(fits, tl.cdiv(steps, high), (2 * steps + even) // (2 * even))
    limit = tl.minimum(tl.maximum(tl.cdiv(kv_len, 64) // 4, least), MOST_SPLITS)
    splits = tl.maximum(tl.minimum(splits, limit), 1)
    share = tl.maximum(tl.cdiv(steps, splits), 1)
    splits = tl.maximum(tl.cdiv(steps, share), 1)

    # 2. Store the items of each sequence: all blocks of the first split, then those of the next.
    count = splits * blocks
    first = tl.cumsum(count, 0) - count
    stored = tl.where(splits > 1, q_len * splits, 0)
    partial = tl.cumsum(stored, 0) - stored
    for nth in range(tl.max(count, 0)):
        split = nth // tl.maximum(blocks, 1)
        block = nth % tl.maximum(blocks, 1)
        begin = split * share * TOKENS
        item = items + (first + nth) * ITEM
        real = (nth < count) & (first + nth < most)
        tl.store(item, start, mask=real)
        tl.store(item + 1, q_len, mask=real)
        tl.store(item + 2, kv_len, mask=real)
        tl.store(item + 3, prefix_len, mask=real)
        tl.store(item + 4, tl.maximum(table_row, 0), mask=real)
        tl.store(item + 5, block * PAIRS, mask=real)
        tl.store(item + 6, begin, mask=real)
        tl.store(item + 7, tl.minimum(begin + share * TOKENS, kv_len), mask=real)
        tl.store(item + 8, split, mask=real)
        tl.store(item + 9, splits, mask=real)
        tl.store(item + 10, partial, mask=real)
        tl.store(item + 11, first + block, mask=real)
    rest = tl.arange(0, BLOCK_Z)
    for at in range(tl.sum(count, 0) * ITEM, most * ITEM, BLOCK_Z):
        tl.store(items + at + rest, 0 * rest, mask=at + rest < most * ITEM)

    # 3. Store where the partial results of each row are.
    if MERGES:
        for local in range(tl.max(q_len, 0)):
            row = start + local
            real = (local < q_len) & (row < rows)
            tl.store(merges + row * ROW, partial + local, mask=real)
            tl.store(merges + row * ROW + 1, q_len, mask=real)
            tl.store(merges + row * ROW + 2, splits, mask=real)
        for at in range(tl.load(query_start + bs) * ROW, rows * ROW, BLOCK_Z):
            tl.store(merges + at + rest, 0 * rest, mask=at + rest < rows * ROW)


def plan_attention(
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    prefix_lens: torch.Tensor,
    table_rows: torch.Tensor | None,
    sizes: WorkSizes,
) -> WorkList:
    """Make the list that `outrider.kernels.tree_attention.plan_attention` returns."""
    device, bs = kv_lens.device, kv_lens.shape[0]
    merges = (0 if sizes.gathers else sizes.rows, ROW)
    work = WorkList(
        items=_launch.empty((sizes.items, ITEM), torch.int32, device),
        merges=_launch.empty(merges, torch.int32, device),
        arrivals=_launch.empty((sizes.items * sizes.kv_heads if sizes.gathers else 1,), torch.int32, device),
        sizes=sizes,
    )
    block = max(16, _launch.next_power_of_2(bs))
    with _launch.on_device_of(kv_lens):
        _plan_attention[(1,)](
            kv_lens.contiguous(), query_start.contiguous(), prefix_lens.contiguous(),
            kv_lens if table_rows is None else table_rows.contiguous(), work.items, work.merges, bs,
            sizes.rows, sizes.items, sizes.capacity, sizes.least,
            MOST_SPLITS=MOST_SPLITS, GROUP=sizes.group, PAIRS=sizes.blocks.pairs, TOKENS=sizes.blocks.tokens,
            ITEM=ITEM, ROW=ROW, MAPPED=table_rows is not None, MERGES=not sizes.gathers, BLOCK_B=block,
            BLOCK_Z=512, num_warps=min(8, max(1, block // 128)), **_launch.dependent(kv_lens),
        )  # fmt: skip
        # An ordinary launch starts after the plan has ended, so the list is complete before any later kernel
        # starts. Attention reads its items before it waits for the kernel that precedes it.
        work.arrivals.zero_()
    return work
