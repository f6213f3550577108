"""Merges partial results (splits) of `tree_attention`: in the program that ends last, or in a second launch.

In both cases, the splits are added in the order of their numbers, so results do not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def store_split(partial, stats, place, top, total, acc, real, d, element, DIM: tl.constexpr):
    """Store the maximum, the sum and the weighted sum of a split at `place`, an index of (row, head)."""
    tl.store(partial + place[:, None] * DIM + d[None, :], acc, mask=element)
    tl.store(stats + 2 * place, top, mask=real)
    tl.store(stats + 2 * place + 1, total, mask=real)


@triton.jit
def is_last(counter, splits):
    """Count this program as ended. Return whether it is the last of `splits` programs."""
    tl.debug_barrier()  # all threads must have stored before one of them signals it
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1


@triton.jit
def gather(
    partial,
    stats,
    place,
    stride,
    real,
    d,
    element,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return maximum, sum and weighted sum over all splits."""
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for nth in tl.static_range(SPLITS):
        own = tl.load(
            stats + 2 * (nth * stride + place), mask=real, other=-float("inf"), cache_modifier=".cg"
        )
        top = tl.maximum(top, own)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for nth in tl.static_range(SPLITS):
        at = nth * stride + place
        own = tl.load(stats + 2 * at, mask=real, other=-float("inf"), cache_modifier=".cg")
        part = tl.load(stats + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(own - base)
        total += part * weight
        part = tl.load(
            partial + at[:, None] * DIM + d[None, :], mask=element, other=0.0, cache_modifier=".cg"
        )
        acc += part * weight[:, None]
    return top, total, acc


@triton.jit(do_not_specialize=["rows", "splits"], do_not_specialize_on_alignment=["query_start", "sinks"])
def merge(
    query_start, partial, stats, sinks, out, rows, splits, HEADS: tl.constexpr, DIM: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr, FEW: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Merge the splits of a uniform batch. `_merge_either` explains FEW and BLOCK_S."""
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
        _merge_either(
            partial, stats, sinks, out, start + local, rows, splits, start + local, head, HEADS, DIM, SINKS,
            PDL, FEW, BLOCK_S, BLOCK_D
        )  # fmt: skip


@triton.jit
def gather_some(
    partial, stats, place, stride, splits, real, d, element, DIM: tl.constexpr, MOST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Return maximum, sum and weighted sum over all splits. The host does not have their number `splits`."""
    nth = tl.arange(0, MOST)
    all_at = nth[:, None] * stride + place[None, :]
    given = (nth < splits)[:, None] & real[None, :]
    # Load all maxima and sums at once: one memory latency for any number of splits.
    tops = tl.load(stats + 2 * all_at, mask=given, other=-float("inf"), cache_modifier=".cg")
    totals = tl.load(stats + 2 * all_at + 1, mask=given, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(tops - base[None, :]) * totals, 0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Some splits at a time, as many as fit into registers, so that their latencies overlap.
    for first in range(0, splits, 64 // BLOCK_M):
        for step in tl.static_range(64 // BLOCK_M):
            at = (first + step) * stride + place
            shown = real & (first + step < splits)
            own = tl.load(stats + 2 * at, mask=shown, other=-float("inf"), cache_modifier=".cg")
            part = tl.load(
                partial + at[:, None] * DIM + d[None, :], mask=element & shown[:, None], other=0.0,
                cache_modifier=".cg"
            )  # fmt: skip
            acc += part * tl.exp2(own - base)[:, None]
    return top, total, acc


@triton.jit(do_not_specialize_on_alignment=["sinks"])
def merge_rows(
    merges, partial, stats, sinks, out, HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr, ROW: tl.constexpr, FEW: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Merge the splits of a ragged batch. `merges` locates the partial results (`WorkList`)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(merges + row * ROW)
    stride = tl.load(merges + row * ROW + 1)
    splits = tl.load(merges + row * ROW + 2)
    if PDL and RELEASE == 2:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL and RELEASE == 1:
        gdc_launch_dependents()
    if splits > 1:
        _merge_either(
            partial, stats, sinks, out, first, stride, splits, row, head, HEADS, DIM, SINKS, PDL, FEW,
            BLOCK_S, BLOCK_D
        )  # fmt: skip


@triton.jit
def _merge_either(
    partial, stats, sinks, out, first, stride, splits, row, head, HEADS: tl.constexpr, DIM: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr, FEW: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Merge the splits of one row and head. Their rows of partial results begin at `first`, `stride` apart.

    A row of at most FEW splits is merged by a smaller block, which loads fewer registers. One compiled
    variant therefore serves any number of splits up to BLOCK_S.
    """
    if splits > FEW:
        place = (first + tl.arange(0, BLOCK_S).to(tl.int64) * stride) * HEADS + head
        _merge_at(
            partial, stats, sinks, out, place, splits, row, head, HEADS, DIM, SINKS, PDL, BLOCK_S, BLOCK_D
        )
    else:
        few_places = (first + tl.arange(0, FEW).to(tl.int64) * stride) * HEADS + head
        _merge_at(
            partial, stats, sinks, out, few_places, splits, row, head, HEADS, DIM, SINKS, PDL, FEW, BLOCK_D
        )


@triton.jit
def _merge_at(
    partial, stats, sinks, out, place, splits, row, head, HEADS: tl.constexpr, DIM: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Merge the splits at the indices `place` of (row, head), and store the row's result."""
    d = tl.arange(0, BLOCK_D)
    real = tl.arange(0, BLOCK_S) < splits
    # Issue all three loads before using any: one memory latency instead of three.
    tops = tl.load(stats + 2 * place, mask=real, other=-float("inf"))
    totals = tl.load(stats + 2 * place + 1, mask=real, other=0.0)
    parts = tl.load(
        partial + place[:, None] * DIM + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0
    )
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weights * totals, 0)
    if SINKS:
        total += tl.exp2(
            tl.load(sinks + head) * 1.4426950408889634 - tl.where(top == -float("inf"), 0.0, top)
        )
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if PDL:
        gdc_launch_dependents()
    tl.store(
        out + (row.to(tl.int64) * HEADS + head) * DIM + d,
        result.to(out.dtype.element_ty),
        mask=d < DIM,
    )
