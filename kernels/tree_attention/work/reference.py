"""Reference of plan_attention, in Python. `kernels.tree_attention` documents the ops."""

from __future__ import annotations

from itertools import pairwise

import torch

from outrider.kernels._launch import ceil_div
from outrider.kernels.tree_attention.work.types import ITEM, MOST_SPLITS, ROW, WorkList, WorkSizes


def plan_attention(
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    prefix_lens: torch.Tensor,
    table_rows: torch.Tensor | None,
    sizes: WorkSizes,
) -> WorkList:
    """Make the list that `outrider.kernels.tree_attention.plan_attention` returns. Wait for the device."""
    block, tokens = sizes.blocks.pairs, sizes.blocks.tokens
    owners = list(range(kv_lens.shape[0])) if table_rows is None else table_rows.tolist()
    spans = list(pairwise(query_start.tolist()))
    lens = [
        max(kv_len, 0) if owner >= 0 and stop > start else 0
        for kv_len, owner, (start, stop) in zip(kv_lens.tolist(), owners, spans, strict=True)
    ]
    blocks = [ceil_div((stop - start) * sizes.group, block) for start, stop in spans]
    steps = [ceil_div(kv_len, tokens) for kv_len in lens]
    splits = [
        min(wanted, MOST_SPLITS, max(sizes.least, ceil_div(kv_len, 64) // 4))
        for wanted, kv_len in zip(_splits(blocks, steps, sizes.capacity), lens, strict=True)
    ]
    items: list[list[int]] = []
    merges = [[0] * ROW for _ in range(sizes.rows)]
    partial = 0
    for b, (start, stop) in enumerate(spans):
        share = max(1, ceil_div(steps[b], max(1, splits[b])))
        count = max(1, ceil_div(steps[b], share))
        first = len(items)
        prefix_len = min(int(prefix_lens[b]), lens[b])
        for split in range(count):
            begin = split * share * tokens
            end = min(begin + share * tokens, lens[b])
            for nth in range(blocks[b]):
                items.append(
                    [start, stop - start, lens[b], prefix_len, max(owners[b], 0), nth * block, begin, end]
                )
                items[-1] += [split, count, partial, first + nth]
        for local in range(stop - start):
            merges[start + local] = [partial + local, stop - start, count]
        partial += (stop - start) * count if count > 1 else 0
    items += [[0] * ITEM for _ in range(sizes.items - len(items))]
    device = kv_lens.device
    return WorkList(
        items=torch.tensor(items, dtype=torch.int32, device=device).view(-1, ITEM),
        merges=torch.tensor([] if sizes.gathers else merges, dtype=torch.int32, device=device).view(-1, ROW),
        arrivals=torch.zeros(
            sizes.items * sizes.kv_heads if sizes.gathers else 1, dtype=torch.int32, device=device
        ),
        sizes=sizes,
    )


def _splits(blocks: list[int], steps: list[int], capacity: int) -> list[int]:
    """Return the number of splits of each sequence, before `plan_attention` limits the number."""
    work = list(zip(blocks, steps, strict=True))
    even = max(1, ceil_div(sum(count * length for count, length in work), capacity))

    def fits(share: int) -> bool:
        return sum(count * ceil_div(length, share) for count, length in work) <= capacity

    if fits(2 * even):
        share = next(share for share in range(even, 2 * even + 1) if fits(share))
        return [ceil_div(length, share) for length in steps]
    return [(2 * length + even) // (2 * even) for length in steps]
