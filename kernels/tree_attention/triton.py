"""Triton version of tree_attention. `kernels.tree_attention` documents the ops.

One program handles a block of (row, head of the group) pairs of one sequence and one K/V head. A group
consists of the query heads that share the K/V head. K and V are read once for the whole group. The program
folds token indices into three values: a maximum, a sum and an accumulator (see `fold`).

If a batch has too few blocks to fill the GPU, the token indices are split over several programs. Each program
then stores its three values for a merge. If there are few splits, the program that ends last merges them. If
there are many, a second launch merges them. Splits are always merged in order. The number of splits depends
only on integers that the host knows.

With a work list (WORK), a program takes its block of pairs and its token indices from an item of the list.

The constant WIDEN converts the operands of a dot product to fp32. It is set only under Triton's interpreter,
which would read the bits of a bf16 operand as an integer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.ahead import covers_all_sizes, rehearsing
from outrider.kernels.tree_attention.fold.triton import count_bits, first_column_of, fold, within
from outrider.kernels.tree_attention.limits import has_room, processors
from outrider.kernels.tree_attention.merge.triton import (
    gather,
    gather_some,
    is_last,
    merge,
    merge_rows,
    store_split,
)
from outrider.kernels.tree_attention.plan import Blocks, choose_blocks
from outrider.kernels.tree_attention.variants import all_blocks
from outrider.kernels.tree_attention.work.types import ITEM, MOST_SPLITS, ROW, WorkList

_LOG2E = 1.4426950408889634


# These numbers change from pass to pass, and so do the addresses of these tensors, whose elements are loaded
# one by one. A specialised kernel would be no faster.
@triton.jit(
    do_not_specialize=["table_stride", "rows", "splits"],
    do_not_specialize_on_alignment=[
        *("prefix_lens", "kv_lens", "query_start", "ancestors", "row_positions", "sinks"),
    ],
)
def _attention(
    q, k_plane, v_plane, page_table, table_rows, items, prefix_lens, kv_lens, query_start, ancestors,
    row_positions, sinks, out, partial, stats, arrivals, q_row, q_head, out_row, table_stride, words, window,
    scale, softcap, rows, splits,
    WIDEN: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
    SINKS: tl.constexpr, SOFTCAP: tl.constexpr, WORK: tl.constexpr, ITEM: tl.constexpr, MAPPED: tl.constexpr,
    SPLIT: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, PDL: tl.constexpr,
    RELEASE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    kv_head, sequence, split = tl.program_id(1), tl.program_id(2), tl.program_id(2) * 0
    if SPLIT:
        sequence, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    # 1. Find the range of token indices that this program's pairs see. Lengths, pages and masks are older
    # than the previous kernel, so they are read before waiting for its end.
    if WORK:
        item = items + tl.program_id(2) * ITEM
        start = tl.load(item)
        q_len = tl.load(item + 1)
        kv_len = tl.load(item + 2)
        known_prefix = tl.load(item + 3)
        table_row = tl.load(item + 4)
        first_pair = tl.load(item + 5)
        first_token = tl.load(item + 6)
        stop_token = tl.load(item + 7)
        split = tl.load(item + 8)
        parts = tl.load(item + 9)
        first_partial = tl.load(item + 10)
        counter = arrivals + tl.load(item + 11) * KV_HEADS + kv_head
    else:
        first_pair = tl.program_id(0) * BLOCK_M
        start = tl.load(query_start + sequence)
        q_len = tl.load(query_start + sequence + 1) - start
        kv_len = tl.load(kv_lens + sequence)
        table_row = sequence
        if MAPPED:
            table_row = tl.load(table_rows + sequence)
            kv_len = tl.where(table_row < 0, 0, kv_len)
        counter = arrivals + ((sequence * KV_HEADS + kv_head) * tl.num_programs(0) + tl.program_id(0))
    table = page_table + table_row.to(tl.int64) * table_stride
    pair = first_pair + tl.arange(0, BLOCK_M)
    local = pair // GROUP
    real = local < q_len
    row = tl.where(real, start + local, -1).to(tl.int64)
    position = kv_len - q_len + local
    first_column = local * 0
    prefix_len = kv_len
    begin = 0
    if TREE:
        prefix_len = known_prefix if WORK else tl.minimum(tl.load(prefix_lens + sequence), kv_len)
        shared_end, end = prefix_len, kv_len
        if WINDOW:
            if POSITIONS:
                position = tl.load(row_positions + row, mask=real, other=2147483647)
            else:
                position = prefix_len - 1 + tl.zeros((BLOCK_M,), tl.int32)
                for word in range(words):
                    position += count_bits(tl.load(ancestors + row * words + word, mask=real, other=0))
                position = tl.where(real, position, 2147483647)
            begin = tl.minimum(tl.maximum(tl.min(position, 0) - window + 1, 0), shared_end)
            first_column = first_column_of(ancestors, row, words, window)
    else:
        first = kv_len - q_len + first_pair // GROUP
        shared_end = tl.maximum(tl.minimum(first + 1, kv_len), 0)
        end = tl.maximum(
            tl.minimum(kv_len - q_len + (first_pair + BLOCK_M - 1) // GROUP + 1, kv_len), shared_end
        )
        if WINDOW:
            begin = tl.minimum(tl.maximum(first - window + 1, 0), shared_end)
    if WORK:
        begin, end = tl.maximum(begin, first_token), tl.minimum(end, stop_token)
        shared_end = tl.minimum(tl.maximum(shared_end, begin), end)
    elif SPLIT:  # cut the visible range into shares of whole steps
        share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, end)
        shared_end = tl.minimum(tl.maximum(shared_end, begin), end)
    pages = tl.load(table + within(begin, end, BLOCK_N) // PAGE_SIZE, mask=begin < end, other=0)
    if PDL and RELEASE == 2:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL and RELEASE == 1:
        gdc_launch_dependents()
    # 2. Load the queries and fold K and V of that range.
    if first_pair < q_len * GROUP:
        head = kv_head * GROUP + pair % GROUP
        d = tl.arange(0, BLOCK_D)
        element = real[:, None] & (d < DIM)[None, :]
        if TRANSPOSED:
            element_of_q = row[None, :] * q_row + head[None, :] * q_head + d[:, None]
            query = tl.load(q + element_of_q, mask=real[None, :] & (d < DIM)[:, None], other=0.0)
        else:
            query = tl.load(
                q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=element, other=0.0
            )
        if WIDEN:
            query = query.to(tl.float32)
        top, total, acc = fold(
            query, begin, shared_end, end, pages, table, k_plane + kv_head * DIM, v_plane + kv_head * DIM,
            row, position, first_column, prefix_len, ancestors, words, window, scale, softcap, KV_HEADS * DIM,
            PAGE_SIZE, DIM, TREE, WINDOW, SOFTCAP, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_D
        )  # fmt: skip
        if TRANSPOSED:
            acc = acc.T
        if PDL:
            gdc_launch_dependents()
        # 3. With splits: store this split's results. The last program merges them in the order of the splits.
        last = split >= 0
        if WORK:
            if parts > 1:
                # Partial results lie by split, then by row of the sequence.
                place = (first_partial + local).to(tl.int64) * (KV_HEADS * GROUP) + head
                stride = q_len.to(tl.int64) * (KV_HEADS * GROUP)
                store_split(partial, stats, split * stride + place, top, total, acc, real, d, element, DIM)
                last = split < 0
                if GATHER > 0:
                    last = is_last(counter, parts)
                    if last:
                        tl.store(counter, 0)  # ready for the next launch
                        top, total, acc = gather_some(
                            partial,
                            stats,
                            place,
                            stride,
                            parts,
                            real,
                            d,
                            element,
                            DIM,
                            GATHER,
                            BLOCK_M,
                            BLOCK_D,
                        )
        elif SPLIT:
            place = row * (KV_HEADS * GROUP) + head
            stride = rows.to(tl.int64) * (KV_HEADS * GROUP)
            store_split(partial, stats, split * stride + place, top, total, acc, real, d, element, DIM)
            if GATHER > 0:
                last = is_last(counter, splits)
                if last:
                    tl.store(counter, 0)  # ready for the next launch
                    top, total, acc = gather(
                        partial, stats, place, stride, real, d, element, DIM, GATHER, BLOCK_M, BLOCK_D
                    )
        # 4. Divide by the sum of the weights and store. Without GATHER, the second launch stores the splits.
        if last and (WORK or GATHER > 0 or not SPLIT):
            if SINKS:
                total += tl.exp2(
                    tl.load(sinks + head) * 1.4426950408889634 - tl.where(top == -float("inf"), 0.0, top)
                )
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that sees nothing yields zeros
            tl.store(
                out + row[:, None] * out_row + head[:, None] * DIM + d[None, :],
                result.to(out.dtype.element_ty),
                mask=element,
            )


_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}
_MOST_COUNTERS = 1024


def _can_count(k_plane: torch.Tensor) -> bool:
    """Return whether the counters of finished programs are available for a K plane of the KV cache.

    The counters are allocated on the first call with a plane. That call must not happen while a CUDA graph is
    captured.
    """
    made = (k_plane.device, k_plane.data_ptr()) in _COUNTERS
    return made or not (k_plane.is_cuda and torch.cuda.is_current_stream_capturing())


def _counters(k_plane: torch.Tensor) -> torch.Tensor:
    """Return the counters of finished programs, one for each block of (row, head) pairs.

    Between launches, all counters are zero. Each plane of the KV cache has its own counters, because
    attention over different planes may overlap. Steps over the same plane run one after the other.
    """
    key = (k_plane.device, k_plane.data_ptr())
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=k_plane.device)
    return _COUNTERS[key]


def tree_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    ancestors: torch.Tensor | None,
    row_positions: torch.Tensor | None,
    sinks: torch.Tensor | None,
    table_rows: torch.Tensor | None,
    work: WorkList | None,
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_kv_len: int,
    window: int,
    softcap: float,
) -> None:
    """Compute `outrider.kernels.tree_attention.tree_attention` into `out`."""
    bs, rows = kv_lens.shape[0], q.shape[0]
    page_size, kv_heads, dim = k_plane.shape[1:]
    heads = q.shape[1]
    group = heads // kv_heads
    pairs = max_query_len * group
    if pairs == 0 or bs == 0:
        return
    q = q if q.stride(2) == 1 else q.contiguous()
    tree = ancestors is not None
    masks = ancestors.contiguous() if ancestors is not None else query_start
    block_d = max(16, _launch.next_power_of_2(dim))
    starts = query_start.contiguous()
    page_table, lens = page_table.contiguous(), (prefix_lens.contiguous(), kv_lens.contiguous())
    owners = starts if table_rows is None else table_rows.contiguous()
    positions = starts if row_positions is None else row_positions.contiguous()
    logits = starts if sinks is None else sinks.contiguous()
    same_type = k_plane.dtype == q.dtype
    roomy, count = same_type and has_room(q.device), processors(q.device)

    def launch(blocks: Blocks, *, stores: bool = True) -> None:
        """Launch the kernels with these sizes. Without `stores`, allocate no memory for partial results."""
        partial = stats = arrivals = out
        splits, late = blocks.splits, {"RELEASE": blocks.release.value, **_launch.dependent(q)}
        if work is not None:
            grid, gathered = (1, kv_heads, work.sizes.items), MOST_SPLITS if blocks.merges_itself else 0
            splits, stored, arrivals = 1, work.sizes.partial_rows, work.arrivals
        else:
            grid = (_launch.ceil_div(pairs, blocks.pairs), kv_heads, bs * splits)
            gathers = blocks.gathers and splits > 1 and grid[0] * kv_heads * bs <= _MOST_COUNTERS
            gathered, stored = splits if gathers and _can_count(k_plane) else 0, splits * rows
            if gathered:
                arrivals = _counters(k_plane)
        if work is not None or splits > 1:
            partial = _launch.empty((stored if stores else 1, heads, dim), torch.float32, q.device)
            stats = _launch.empty((stored if stores else 1, heads, 2), torch.float32, q.device)
        _attention[grid](
            q, k_plane, v_plane, page_table, owners, starts if work is None else work.items, *lens, starts,
            masks, positions, logits, out, partial, stats, arrivals, q.stride(0), q.stride(1), heads * dim,
            page_table.shape[1], masks.shape[1] if tree else 0, window,
            scale / softcap if softcap > 0 else scale * _LOG2E, softcap * _LOG2E, rows if work is None else 0,
            splits,
            WIDEN=not isinstance(_attention, triton.JITFunction), GROUP=group, KV_HEADS=kv_heads, DIM=dim,
            PAGE_SIZE=page_size, TREE=tree, WINDOW=window > 0, POSITIONS=row_positions is not None,
            SINKS=sinks is not None, SOFTCAP=softcap > 0, WORK=work is not None, ITEM=ITEM,
            MAPPED=table_rows is not None, SPLIT=splits > 1, GATHER=gathered,
            # The transposed form pays off only if K and V need no widening in registers.
            TRANSPOSED=blocks.transposed and same_type, BLOCK_M=blocks.pairs, BLOCK_N=blocks.tokens,
            BLOCK_D=block_d, num_warps=blocks.warps, num_stages=blocks.stages, **late,
        )  # fmt: skip
        merged = {
            "HEADS": heads, "DIM": dim, "SINKS": sinks is not None, "FEW": MOST_SPLITS // 4,
            "BLOCK_S": MOST_SPLITS, "BLOCK_D": block_d, "num_warps": 1, **late,
        }  # fmt: skip
        if work is not None and not gathered:
            merge_rows[(rows, heads)](work.merges, partial, stats, logits, out, ROW=ROW, **merged)
        elif splits > 1 and not gathered:
            merge[(max_query_len, heads, bs)](starts, partial, stats, logits, out, rows, splits, **merged)

    sizes = kv_heads, block_d, q.element_size()
    with _launch.on_device_of(q):
        if rehearsing() and covers_all_sizes(
            (
                *("tree_attention", heads, kv_heads, dim, page_size, q.dtype, k_plane.dtype),
                *(masks.shape[1] if tree else 0, window > 0, sinks is None, softcap > 0),
                *(row_positions is None, table_rows is None, work is None),
            )
        ):
            for blocks in all_blocks(group, *sizes, count, roomy, ragged=work is not None):
                launch(blocks, stores=False)
        if work is not None:
            launch(work.sizes.blocks)
        else:
            launch(choose_blocks(bs, rows, pairs, *sizes, max_kv_len, count, roomy))
