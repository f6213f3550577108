"""Lists all results of `choose_blocks` for some heads, so that all variants can be compiled ahead of time.

Which variant a launch needs depends on the numbers of sequences, rows and tokens, which follow the load. The
variants are found by asking `choose_blocks` for the whole range of these numbers. There is no other list.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from outrider.kernels.tree_attention.plan import Blocks, choose_blocks

MOST_ROWS = 16384
"""Largest number of rows of a pass in the range. Larger passes use the same block sizes."""
_MOST_SEQUENCES = 512  # more sequences use the same block sizes
_DENSE = 16  # up to this number, the range contains every number
_MOST_SMALL = 128  # more rows do not change the start of the next kernel
_LONG = 1 << 20  # tokens: more than any sequence that is not split


@functools.cache
def all_blocks(
    group: int, kv_heads: int, block_d: int, itemsize: int, processors: int, roomy: bool, ragged: bool
) -> tuple[Blocks, ...]:
    """Return all block sizes that launches of the attention kernel with these heads can have.

    Args:
        group: Number of query heads per K/V head.
        kv_heads, block_d, itemsize, processors, roomy: As for `choose_blocks`.
        ragged: True for launches with a work list, False for launches without one.
    """
    return tuple(
        dict.fromkeys(
            choose_blocks(
                bs, rows, max_query_len * group, kv_heads, block_d, itemsize, tokens, processors, roomy
            )
            for bs, rows, max_query_len, tokens in _sizes(ragged)
        )
    )


def _sizes(ragged: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sequences, rows, rows of the longest sequence, tokens of the longest sequence).

    Without a work list, each sequence has at least one row and may have no other tokens. With a work list,
    `choose_work` counts as many sequences as can have the largest number of rows, and at least one. A round
    may have fewer rows than that, or more.
    """
    for max_query_len in _spread(MOST_ROWS):
        for bs in _spread(_MOST_SEQUENCES):
            least, most = max_query_len + bs - 1, max_query_len * bs
            if ragged:
                least, most = (1 if bs == 1 else most), MOST_ROWS
            if least > MOST_ROWS:
                break
            for rows in _edges(least, most):
                yield bs, rows, max_query_len, _LONG
                if not ragged:
                    yield bs, rows, max_query_len, max_query_len


def _edges(least: int, most: int) -> set[int]:
    """Return both numbers, and the small powers of two and their successors that lie between them."""
    near = {(1 << bits) + more for bits in range(_MOST_SMALL.bit_length()) for more in (0, 1)}
    return {least, most, *(number for number in near if least <= number <= most)}


def _spread(most: int) -> Iterator[int]:
    """Yield numbers from 1 to `most`, ascending: all small ones, and some near each power of two."""
    yield from range(1, min(most, _DENSE) + 1)
    power = _DENSE
    while power < most:
        for number in (power + 1, power + power // 2, 2 * power - 1, 2 * power):
            if number <= most:
                yield number
        power *= 2
