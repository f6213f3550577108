"""tree_attention in Triton; the contract is in the package's docstring.

One program handles a block of (row, head of the group) pairs of one sequence and one K/V head, so that K and V are read once for the whole
group. Two loops: over the token indices that all its rows see (no mask but the end), then over the rest (the diagonal, or the tree's
columns); both carry (maximum, sum, accumulator). Where a batch has too few blocks to fill the GPU, the token indices are split over
programs, each leaves those three in memory, and a second launch merges them. The number of splits depends on host integers only.
WIDEN is set under the interpreter, whose dot takes the bits of a bf16 for an integer.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.tree_attention.plan import choose_blocks

_LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    query, top, total, acc, begin, end, table, k_head, v_head, row, position, first_column, prefix_len, ancestors, words, window,
    scale, softcap, WIDEN: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Fold the token indices [begin, end) into the running softmax of a block of rows."""
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        index = first + tl.arange(0, BLOCK_N)
        inside = index < end
        page = tl.load(table + index // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        slot = (page * PAGE_SIZE + index % PAGE_SIZE) * SLOT_STRIDE
        k = tl.load(k_head + slot[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(v_head + slot[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        k, v = k.to(query.dtype), v.to(query.dtype)  # planes may be FP8
        visible = inside[None, :] & (row >= 0)[:, None]
        if MASKED:
            if TREE:
                column = index - prefix_len
                bits = tl.zeros((query.shape[0], BLOCK_N), tl.int32)
                for nth in tl.static_range((BLOCK_N + 31) // 32 + 1):  # a block's columns lie in so many words at most
                    place = (first - prefix_len) // 32 + nth
                    word = tl.load(ancestors + row * words + place, mask=(row >= 0) & (place < words), other=0)
                    bits += tl.where((column // 32 == place)[None, :], (word[:, None] >> (column % 32)[None, :]) & 1, 0)
                visible = visible & (bits != 0)
                if WINDOW:
                    visible = visible & (column[None, :] >= first_column[:, None])
            else:
                visible = visible & (index[None, :] <= position[:, None])
        if WINDOW and not (MASKED and TREE):
            visible = visible & (index[None, :] > (position - window)[:, None])
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh
        scores = tl.where(visible, scores, -float("inf"))  # in units of log2
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _count_bits(word):
    """Return how many of the 32 bits are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@triton.jit
def _first_column(ancestors, row, words, window):
    """Return the column of the window-th node of each row's path, counted from its end: what lies before it is out of the window."""
    column = row.to(tl.int32) * 0
    if window < words * 32:  # no path is longer than its mask
        missing = column + window
        for index in range(words):
            word = tl.load(ancestors + row * words + (words - 1 - index), mask=row >= 0, other=0)
            nodes = _count_bits(word)
            bit = column * 0  # the highest with `missing` nodes at and above it
            for step in tl.static_range(5):
                higher = bit + (16 >> step)
                bit = tl.where(_count_bits((word >> higher) & (0x7FFFFFFF >> (higher - 1))) >= missing, higher, bit)
            column = tl.where((missing > 0) & (nodes >= missing), (words - 1 - index) * 32 + bit, column)
            missing -= nodes
    return column


@triton.jit
def _attention(
    q, k_plane, v_plane, page_table, prefix_lens, kv_lens, query_start, ancestors, row_positions, sinks, out, partial, stats,
    q_row, q_head, out_row, table_stride, words, window, scale, softcap, rows, splits,
    WIDEN: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    kv_head, sequence, split = tl.program_id(1), tl.program_id(2) // splits, tl.program_id(2) % splits
    start = tl.load(query_start + sequence)
    q_len = tl.load(query_start + sequence + 1) - start
    kv_len = tl.load(kv_lens + sequence)
    table = page_table + sequence.to(tl.int64) * table_stride
    k_head, v_head = k_plane + kv_head * DIM, v_plane + kv_head * DIM
    first_pair = tl.program_id(0) * BLOCK_M
    prefix_len = kv_len
    if TREE:
        prefix_len = tl.minimum(tl.load(prefix_lens + sequence), kv_len)
    if PDL and RELEASE == 2:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL and RELEASE == 1:
        gdc_launch_dependents()
    if first_pair < q_len * GROUP:
        pair = first_pair + tl.arange(0, BLOCK_M)
        local = pair // GROUP
        real = local < q_len
        row = tl.where(real, start + local, -1).to(tl.int64)
        head = kv_head * GROUP + pair % GROUP
        d = tl.arange(0, BLOCK_D)
        element = real[:, None] & (d < DIM)[None, :]
        query = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=element, other=0.0)
        if WIDEN:
            query = query.to(tl.float32)
        position = kv_len - q_len + local
        first_column = local * 0
        begin = 0
        if TREE:
            shared_end = prefix_len
            end = kv_len
            if WINDOW:
                if POSITIONS:
                    position = tl.load(row_positions + row, mask=real, other=2147483647)
                else:
                    position = prefix_len - 1 + tl.zeros((BLOCK_M,), tl.int32)
                    for word in range(words):
                        position += _count_bits(tl.load(ancestors + row * words + word, mask=real, other=0))
                    position = tl.where(real, position, 2147483647)
                begin = tl.minimum(tl.maximum(tl.min(position, 0) - window + 1, 0), shared_end)
                first_column = _first_column(ancestors, row, words, window)
        else:
            first = kv_len - q_len + first_pair // GROUP
            last = kv_len - q_len + (first_pair + BLOCK_M - 1) // GROUP
            shared_end = tl.maximum(tl.minimum(first + 1, kv_len), 0)
            end = tl.maximum(tl.minimum(last + 1, kv_len), shared_end)
            if WINDOW:
                begin = tl.minimum(tl.maximum(first - window + 1, 0), shared_end)
        if SPLIT:
            share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
            begin += split * share
            end = tl.minimum(begin + share, end)
            shared_end = tl.minimum(tl.maximum(shared_end, begin), end)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        top, total, acc = _attend(
            query, top, total, acc, begin, shared_end, table, k_head, v_head, row, position, first_column, prefix_len, ancestors,
            words, window, scale, softcap, WIDEN, KV_HEADS * DIM, PAGE_SIZE, DIM, False, TREE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D
        )  # fmt: skip
        top, total, acc = _attend(
            query, top, total, acc, shared_end, end, table, k_head, v_head, row, position, first_column, prefix_len, ancestors,
            words, window, scale, softcap, WIDEN, KV_HEADS * DIM, PAGE_SIZE, DIM, True, TREE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D
        )  # fmt: skip
        if PDL:
            gdc_launch_dependents()
        if SPLIT:
            place = (split * rows + row) * (KV_HEADS * GROUP) + head
            tl.store(partial + place[:, None] * DIM + d[None, :], acc, mask=element)
            tl.store(stats + 2 * place, top, mask=real)
            tl.store(stats + 2 * place + 1, total, mask=real)
        else:
            if SINKS:
                total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - tl.where(top == -float("inf"), 0.0, top))
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + row[:, None] * out_row + head[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=element)


@triton.jit
def _merge(
    query_start, partial, stats, sinks, out, rows, splits, HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    local, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    q_len = tl.load(query_start + sequence + 1) - start
    if PDL and RELEASE == 2:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL and RELEASE == 1:
        gdc_launch_dependents()
    if local < q_len:
        split, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        place = (split.to(tl.int64) * rows + start + local) * HEADS + head
        real = split < splits
        # All three are asked for before any is used: one memory latency, not three.
        tops = tl.load(stats + 2 * place, mask=real, other=-float("inf"))
        totals = tl.load(stats + 2 * place + 1, mask=real, other=0.0)
        parts = tl.load(partial + place[:, None] * DIM + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)
        top = tl.max(tops, 0)
        weights = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top))
        total = tl.sum(weights * totals, 0)
        if SINKS:
            total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - tl.where(top == -float("inf"), 0.0, top))
        result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        if PDL:
            gdc_launch_dependents()
        tl.store(out + ((start + local).to(tl.int64) * HEADS + head) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the multiprocessors of a device; a small number under the interpreter, so that it meets split and unsplit batches."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


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
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_kv_len: int,
    window: int,
    softcap: float,
) -> None:
    """See `outrider.kernels.tree_attention.tree_attention`; writes `out`."""
    bs = page_table.shape[0]
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
    blocks = choose_blocks(bs, q.shape[0], pairs, kv_heads, block_d, q.element_size(), max_kv_len, _processors(q.device))
    splits = blocks.splits
    rows = q.shape[0]
    starts = query_start.contiguous()
    logits = starts if sinks is None else sinks.contiguous()
    late = {"RELEASE": blocks.release.value, **_launch.dependent(q)}
    partial = stats = out
    if splits > 1:
        partial = _launch.empty((splits, rows, heads, dim), torch.float32, q.device)
        stats = _launch.empty((splits, rows, heads, 2), torch.float32, q.device)
    with _launch.on_device_of(q):
        _attention[(_launch.ceil_div(pairs, blocks.pairs), kv_heads, bs * splits)](
            q, k_plane, v_plane, page_table.contiguous(), prefix_lens.contiguous(), kv_lens.contiguous(), starts, masks,
            row_positions.contiguous() if row_positions is not None else starts, logits, out, partial, stats,
            q.stride(0), q.stride(1), heads * dim, page_table.shape[1], masks.shape[1] if tree else 0, window,
            scale / softcap if softcap > 0 else scale * _LOG2E, softcap * _LOG2E, rows, splits,
            WIDEN=not isinstance(_attention, triton.JITFunction), GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE_SIZE=page_size, TREE=tree,
            WINDOW=window > 0, POSITIONS=row_positions is not None, SINKS=sinks is not None, SOFTCAP=softcap > 0,
            SPLIT=splits > 1, BLOCK_M=blocks.pairs, BLOCK_N=blocks.tokens, BLOCK_D=block_d, num_warps=blocks.warps,
            num_stages=blocks.stages, **late,
        )  # fmt: skip
        if splits > 1:
            _merge[(max_query_len, heads, bs)](
                starts, partial, stats, logits, out, rows, splits, HEADS=heads, DIM=dim, SINKS=sinks is not None, BLOCK_S=splits,
                BLOCK_D=block_d, num_warps=1, **late,
            )  # fmt: skip
