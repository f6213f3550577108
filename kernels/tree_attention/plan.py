"""How an attention launch is cut into programs; from host integers only, so that a recorded graph holds for any lengths."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.kernels._launch import ceil_div, next_power_of_2

_MAX_SPLITS = 32
_WIDE = 256


class Release(Enum):
    """When the programs of the next kernel may start, to wait for this one's end or to load what no kernel writes."""

    LATE = 0
    """Before the last stores."""
    WAITED = 1
    """When all programs of this one know that the kernel before it ended."""
    AT_ONCE = 2
    """When all programs of this one run. What the next kernel reads before it waits must be older than the kernel before this one."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a launch.

    Attributes:
        pairs: (row, head of the group) pairs of a program.
        tokens: Token indices that it takes at a time.
        splits: Programs that share the token indices of a block of pairs; a power of two, so that few variants are compiled.
        warps, stages: Of a program.
        release: Of the kernel, and of the one that merges splits.
    """

    pairs: int
    tokens: int
    splits: int
    warps: int
    stages: int
    release: Release = Release.LATE


def choose_blocks(
    bs: int, rows: int, pairs: int, kv_heads: int, block_d: int, itemsize: int, max_kv_len: int, processors: int
) -> Blocks:  # fmt: skip
    """Return the sizes of a launch.

    The shares of a split are cut on the device by the real lengths; a program without one stops at once.

    Args:
        bs: Sequences.
        rows: Of all of them.
        pairs: The most (row, head of the group) pairs of any of them.
        kv_heads: Of the planes.
        block_d: Width of a head, padded.
        itemsize: Bytes of an element.
        max_kv_len: Upper bound of the token indices of a sequence.
        processors: Multiprocessors of the device.
    """
    # A block of K and one of V lie in shared memory, the accumulator in registers: heads as wide as a latent leave room for few rows.
    wide = block_d > _WIDE
    block_pairs = min(max(16, next_power_of_2(pairs)), 16 if wide else 64)
    programs = ceil_div(pairs, block_pairs) * kv_heads * bs
    # Small blocks wait for memory, so more of them at a time hide it; of many rows the merge is dear, so a share is two steps at least.
    single, many = block_pairs == 16, block_pairs == 64
    # Of some sequences with few rows short steps take less time (measured at 4 and 8; one, and 16, are better off with longer ones).
    short = single and processors < 8 * programs and 2 * programs <= processors
    tokens = 16 if wide else 32 if itemsize == 4 or short else 64
    share = 64 if short else tokens * (2 if many else 1)
    splits = next_power_of_2(min((4 if single else 2) * processors // max(1, programs), ceil_div(max_kv_len, share), _MAX_SPLITS))
    stages = 1 if wide else 3 if many and splits == 1 and block_d <= 128 else 2
    return Blocks(block_pairs, tokens, splits, 8 if wide else 4, stages, _release(bs, rows, splits))


def _release(bs: int, rows: int, splits: int) -> Release:
    """Return when the product behind attention may start: as measured in whole passes, and late where nobody measured."""
    if rows <= 2 or (32 < rows <= 64 and splits > 1):
        return Release.AT_ONCE
    return Release.WAITED if bs == 1 and 16 < rows <= 32 and splits > 1 else Release.LATE
