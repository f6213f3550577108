"""`WorkList`, which contains the shares of a ragged batch, and `WorkSizes`, the sizes of such a list.

The sizes depend on host integers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels._launch import ceil_div
from outrider.kernels.tree_attention.plan import FEW_PAIRS, MANY_PAIRS, Blocks, choose_blocks, is_measured

MOST_SPLITS = 32
"""Largest number of splits of a sequence. A merge loads the maxima and sums of all splits together."""
ITEM = 12
"""Number of words of an item; see `WorkList`."""
ROW = 3
"""Number of words of a row's entry in `WorkList.merges`."""
_UNBOUNDED = 1 << 20  # tokens: more than any context that limits the number of splits


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Sizes of a work list for attention, and of the launches that use the list.

    Attributes:
        rows: Number of rows of the step.
        group: Number of query heads per K/V head.
        kv_heads: Number of K/V heads.
        blocks: Sizes of a program, as chosen for the most similar uniform batch. `blocks.splits` is not used.
        capacity: Number of shares (one per program) per K/V head that fill the device.
        least: Number of splits that every sequence may have, even if its splits become very short.
        items: Upper bound of the number of items of the list.
        partial_rows: Upper bound of the number of rows of partial results.
        gathers: True if the last program of a block merges the block's splits. False if a second launch
            merges the splits.
    """

    rows: int
    group: int
    kv_heads: int
    blocks: Blocks
    capacity: int
    least: int
    items: int
    partial_rows: int
    gathers: bool


@dataclass(frozen=True, slots=True)
class WorkList:
    """Work list for attention over a ragged batch, made by `plan_attention`.

    An item is a row of `items`. It describes the work of one program for each K/V head. Its columns are:

    - 0: index of the sequence's first row.
    - 1: number of rows of the sequence.
    - 2: number of tokens of the sequence.
    - 3: number of tokens of the sequence's prefix.
    - 4: the sequence's row of the page table.
    - 5: first (row, head of the group) pair of the program's block, counted within the sequence.
    - 6, 7: token indices ``[begin, end)`` of the program.
    - 8: number of the program's split, from 0.
    - 9: number of splits of the sequence.
    - 10: index P of the sequence's first row of partial results. If the sequence has n rows, the result of
      split s for row i of the sequence is in row ``P + s * n + i``.
    - 11: index of the item that contains the first split of the same block. The block's counter has the same
      index.

    Attributes:
        items: ``[sizes.items, ITEM] int32``. Unneeded items come last and have no rows.
        merges: ``[rows, ROW] int32``, read by the launch that merges splits; empty if `sizes.gathers`. For
            each row: index of the first split's row of partial results, distance to the next split's row,
            and number of splits. If the number of splits is below 2, there is nothing to merge.
        arrivals: ``[items * kv_heads] int32``, counters of ended programs, which are zero between launches.
            Without `sizes.gathers`, the tensor has a single element, which is not used.
        sizes: Sizes of the launches.
    """

    items: torch.Tensor
    merges: torch.Tensor
    arrivals: torch.Tensor
    sizes: WorkSizes


def choose_work(
    bs: int, rows: int, max_query_len: int, group: int, kv_heads: int, block_d: int, itemsize: int,
    processors: int, roomy: bool,
) -> WorkSizes:  # fmt: skip
    """Return the sizes of a work list for attention over a ragged batch.

    The block sizes are those for the most similar uniform batch. In that batch, every sequence has
    `max_query_len` rows, and all sequences together have at most `rows` rows. The number of shares is chosen
    so that the shares fill the device like the programs of that batch.

    Args:
        bs: Number of sequences, including idle ones.
        rows: Total number of rows of the sequences.
        max_query_len: Upper bound of the number of rows of a sequence.
        group: Query heads per K/V head.
        kv_heads: Number of K/V heads.
        block_d: Width of a head, padded.
        itemsize: Bytes per element of the queries.
        processors: Number of multiprocessors of the device.
        roomy: As for `choose_blocks`.
    """
    count = max(1, min(bs, rows // max(1, max_query_len)))
    pairs = max(1, max_query_len) * group
    blocks = choose_blocks(count, rows, pairs, kv_heads, block_d, itemsize, _UNBOUNDED, processors, roomy)
    per_head, least = _slots(count, pairs, blocks, kv_heads, is_measured(block_d, itemsize), processors)
    capacity = max(1, per_head // kv_heads)
    # A sequence of n rows takes at most n * group / blocks.pairs + 1 blocks.
    whole = min(bs, rows) + (rows * group // blocks.pairs if pairs > blocks.pairs else 0)
    # Second and later splits take at most `capacity` items (see the plan in `triton.py`).
    split_rows = capacity * min(max_query_len, ceil_div(blocks.pairs, group))
    return WorkSizes(
        rows,
        group,
        kv_heads,
        blocks,
        capacity,
        least,
        min(whole + capacity, whole * MOST_SPLITS),
        min(rows + split_rows, rows * MOST_SPLITS),
        blocks.merges_itself,
    )


def _slots(
    count: int, pairs: int, blocks: Blocks, kv_heads: int, measured: bool, processors: int
) -> tuple[int, int]:
    """Return the number of attention programs that fill the device, and the value of `WorkSizes.least`.

    Both numbers follow the choice of splits for uniform batches in `choose_blocks`.
    """
    few = pairs <= FEW_PAIRS
    programs = ceil_div(pairs, blocks.pairs) * kv_heads * count
    if not measured:
        return (4 if few else 2) * processors, MOST_SPLITS
    if not few:  # merging many rows is expensive
        double = pairs > MANY_PAIRS and processors // programs > 1
        return (2 if double else 1) * processors, 8
    if count == 1:
        return 4 * processors, MOST_SPLITS
    alone = blocks.splits == 1 and programs <= processors  # such programs take a multiprocessor each
    return (1 if alone else 2) * processors, 4
