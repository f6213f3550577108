"""`WorkList`, the shares of a ragged batch, and its sizes, which depend on host integers only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels._launch import ceil_div
from outrider.kernels.tree_attention.plan import FEW_PAIRS, MANY_PAIRS, Blocks, choose_blocks, is_measured

MOST_SPLITS = 32
"""Most splits of a sequence. Merging loads all of them at once."""
ITEM = 12
"""Words of an item, see `WorkList`."""
ROW = 3
"""Words of a row's entry for the merge, see `WorkList`."""
_UNBOUNDED = 1 << 20  # tokens: more than any context that limits the number of splits


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Sizes of a work list and of the launches that walk it.

    Attributes:
        rows: Rows of the step.
        group: Query heads per K/V head.
        kv_heads: Heads of the planes.
        blocks: Sizes of a program, those of the most similar uniform batch. `splits` is not used.
        capacity: Number of shares per K/V head that fill the device.
        least: Number of splits that a sequence may have even if its splits are then short.
        items: Upper bound of the number of items.
        partial_rows: Upper bound of the number of rows of partial results.
        gathers: True if the program of a block that ends last merges the splits. False if a second launch
            does.
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
    """The shares of a ragged batch, made by `plan_attention`.

    Columns of `items`, each of which is one program per K/V head:

    - 0, 1: first row of the sequence, and its number of rows.
    - 2, 3: number of tokens, and of tokens of the prefix.
    - 4: row of the page table.
    - 5: first (row, head of the group) pair of the program's block, counted within the sequence.
    - 6, 7: token indices ``[begin, end)`` of the program.
    - 8, 9: number of this split, and number of splits.
    - 10: the sequence's first row of partial results. Split s of its row i is at ``s * rows + i`` from there.
    - 11: index of the first split's item for the same block. It numbers the block's counter.

    Attributes:
        items: ``[sizes.items, ITEM] int32``. The items that are not needed are last, and have no rows.
        merges: ``[rows, ROW] int32`` for the second launch: row of partial results of the first split,
            distance to the next split's, and number of splits. A number below 2 means that there is nothing
            to merge. Empty if `sizes.gathers`.
        arrivals: ``[items * kv_heads] int32``, counters of ended programs, which are zero between launches.
            One element, not used, unless `sizes.gathers`.
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
    """Return the sizes of a work list.

    The blocks are those of the most similar uniform batch: as many sequences of `max_query_len` rows as the
    step's rows allow. Shares fill the device as they do there.

    Args:
        bs: Number of sequences, including idle ones.
        rows: Number of rows of all sequences.
        max_query_len: Upper bound of the number of rows of a sequence.
        group: Query heads per K/V head.
        kv_heads: Heads of the planes.
        block_d: Width of a head, padded.
        itemsize: Bytes per element of the queries.
        processors: Multiprocessors of the device.
        roomy: As for `choose_blocks`.
    """
    count = max(1, min(bs, rows // max(1, max_query_len)))
    pairs = max(1, max_query_len) * group
    blocks = choose_blocks(count, rows, pairs, kv_heads, block_d, itemsize, _UNBOUNDED, processors, roomy)
    per_head, least = _slots(count, pairs, blocks, kv_heads, is_measured(block_d, itemsize), processors)
    capacity = max(1, per_head // kv_heads)
    # A sequence of n rows takes at most n * group / blocks.pairs + 1 blocks.
    whole = min(bs, rows) + (rows * group // blocks.pairs if pairs > blocks.pairs else 0)
    # See the plan: splits beyond the first take at most `capacity` items.
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
        blocks.gathers or blocks.splits == 1,
    )


def _slots(
    count: int, pairs: int, blocks: Blocks, kv_heads: int, measured: bool, processors: int
) -> tuple[int, int]:
    """Return how many programs fill the device, and the number of splits that may be short.

    Both follow the choice of splits for uniform batches in `choose_blocks`.
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
