"""Chooses the launch sizes of `tree_attention`.

The choice uses host integers only, so a captured CUDA graph is valid for any lengths of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.kernels._launch import ceil_div, next_power_of_2
from outrider.kernels.stream import FEW_ROWS

FEW_PAIRS, MANY_PAIRS = 16, 64
"""Numbers of (row, head of the group) pairs per program.

Batches with few pairs per sequence use `FEW_PAIRS`. Most other batches use `MANY_PAIRS`.
"""
_NARROW, _WIDE = 64, 256  # widths of a head, padded
_MOST_SPLITS, _MOST_GATHERED = 32, 8
_WHOLE_TOKENS = 128
"""Sequences of at most this many tokens are not split, because a merge would take longer than it saves."""
SHARED_BYTES = 213 << 10
"""Most shared memory, in bytes, that a program uses if it has a multiprocessor to itself."""


class Release(Enum):
    """Earliest start of the next kernel.

    Until this kernel has ended, the next kernel may only load data that no running kernel writes.
    """

    LATE = 0
    """The next kernel may start just before this kernel's last stores."""
    WAITED = 1
    """The next kernel may start once all programs of this kernel have waited for the kernel before it."""
    AT_ONCE = 2
    """The next kernel may start once all programs of this kernel run. Before its wait, it may read only data
    of kernels that are older than the kernel before this one."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of one launch of the attention kernel.

    Attributes:
        pairs: (row, head of the group) pairs per program. A group consists of the query heads that share a
            K/V head.
        tokens: Token indices per step of a program.
        splits: Number of programs that share the token indices of a block of pairs.
        warps: Warps per program.
        stages: Pipeline stages of a program.
        release: Earliest start of the kernel that follows the attention kernel and the merging kernel.
        transposed: True if the pairs are the narrow side of the products; see `fold`.
        gathers: True if the last program of a block merges the block's splits. False if a second launch
            merges the splits.
    """

    pairs: int
    tokens: int
    splits: int
    warps: int
    stages: int
    release: Release = Release.LATE
    transposed: bool = False
    gathers: bool = False

    @property
    def merges_itself(self) -> bool:
        """True if a launch with a work list needs no second launch, which would merge splits."""
        return self.gathers or self.splits == 1


def choose_blocks(
    bs: int, rows: int, pairs: int, kv_heads: int, block_d: int, itemsize: int, max_kv_len: int,
    processors: int, roomy: bool = True
) -> Blocks:  # fmt: skip
    """Return the block sizes for a launch of the attention kernel.

    They are the fastest ones that were measured on an H200, with bf16 heads of 128 elements.

    The token range of each split is determined on the device from the real lengths. A program whose range is
    empty ends immediately. The number of splits therefore does not follow `max_kv_len`, which would only
    multiply the compiled variants.

    Args:
        bs: Number of sequences.
        rows: Total number of rows of the sequences.
        pairs: Largest number of query rows of a sequence, times the number of query heads per K/V head.
        kv_heads: Number of K/V heads.
        block_d: Width of a head, padded.
        itemsize: Bytes per element.
        max_kv_len: Upper bound of the number of tokens of a sequence.
        processors: Number of multiprocessors of the device.
        roomy: True if a program may use `SHARED_BYTES` of shared memory, and K and V have the queries'
            dtype.
    """
    large = _is_large(block_d, itemsize)
    few = pairs <= FEW_PAIRS
    block_pairs = (
        FEW_PAIRS
        if few or block_d > _WIDE
        else min(MANY_PAIRS, next_power_of_2(pairs))
        if large
        else MANY_PAIRS
    )
    programs = max(1, ceil_div(pairs, block_pairs) * kv_heads * bs)
    if not is_measured(block_d, itemsize):
        return _modest(bs, rows, programs, block_pairs, block_d, itemsize, max_kv_len, processors)
    most = _most_splits(max_kv_len)
    deep = block_d <= 128
    # One program per multiprocessor: latency per step dominates, so use long steps with several in flight.
    alone = roomy and deep and processors // 2 < programs <= processors
    if not few:  # one program per block if the blocks fill half the device, as merging many rows is expensive
        room = processors // programs
        splits = min(most, 2 * processors // programs if pairs > MANY_PAIRS and room > 1 else room)
        if splits <= 1:
            if alone and pairs <= MANY_PAIRS // 2:
                return Blocks(MANY_PAIRS // 2, 128, 1, 8, 3, _release(bs, rows, 1), transposed=True)
            return Blocks(block_pairs, 64, 1, 4, 3 if deep else 2, _release(bs, rows, 1))
        stages = (3 if pairs > MANY_PAIRS else 4) if deep else 3
        return Blocks(block_pairs, 32, _power_of_2(splits), 4, stages, _release(bs, rows, splits))
    if bs == 1:
        splits = min(_power_of_2(4 * processors // programs), most)
        return Blocks(block_pairs, 64, splits, 4, 2, _release(bs, rows, splits))
    if alone:
        tokens, stages = (64, 4) if rows == bs else (128, 3)
        return Blocks(block_pairs, tokens, 1, 4, stages, _release(bs, rows, 1))
    splits = min(most, 2 * processors // programs)
    if splits <= 1:
        # Products of few rows (`skinny_gemm`) share multiprocessors with attention, which makes longer steps
        # faster.
        tokens, stages = (64, 2) if rows <= FEW_ROWS else (32, 3)
        return Blocks(block_pairs, tokens, 1, 4, stages, _release(bs, rows, 1))
    splits = _power_of_2(splits)
    stages = (4 if programs * splits <= processors else 3) if deep else 2
    return Blocks(
        block_pairs,
        64,
        splits,
        4,
        stages,
        _release(bs, rows, splits),
        transposed=True,
        gathers=splits <= _MOST_GATHERED,
    )


def is_measured(block_d: int, itemsize: int) -> bool:
    """Return whether the sizes for heads of this padded width and elements of this size were measured."""
    return block_d >= _NARROW and not _is_large(block_d, itemsize)


def _is_large(block_d: int, itemsize: int) -> bool:
    """Return whether heads are so wide or elements so large that shared memory and registers are short."""
    return block_d > _WIDE or itemsize > 2


def _modest(
    bs: int,
    rows: int,
    programs: int,
    block_pairs: int,
    block_d: int,
    itemsize: int,
    max_kv_len: int,
    processors: int,
) -> Blocks:
    """Return sizes for heads and elements whose sizes were not measured.

    Pipelines are short.
    """
    wide, few = block_d > _WIDE, block_pairs == FEW_PAIRS
    tokens = 16 if wide else 32 if itemsize > 2 else 64
    splits = next_power_of_2(min((4 if few else 2) * processors // programs, _most_splits(max_kv_len)))
    return Blocks(block_pairs, tokens, splits, 8 if wide else 4, 1 if wide else 2, _release(bs, rows, splits))


def _most_splits(max_kv_len: int) -> int:
    """Return the largest number of splits of a sequence with at most this many tokens."""
    return 1 if max_kv_len <= _WHOLE_TOKENS else _MOST_SPLITS


def _power_of_2(n: int) -> int:
    """Return the largest power of two <= n. Powers of two limit the number of compiled variants."""
    return 1 << (max(1, n).bit_length() - 1)


def _release(bs: int, rows: int, splits: int) -> Release:
    """Return when the matrix product that follows attention may start.

    Early starts are limited to the cases in which they measured faster.
    """
    if rows <= 2 or (splits > 1 and (bs >= 4 or 32 < rows <= 64)):
        return Release.AT_ONCE
    return Release.WAITED if bs == 1 and 16 < rows <= 32 and splits > 1 else Release.LATE
