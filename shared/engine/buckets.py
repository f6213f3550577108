"""Sizes that batches and prompts are padded to, so that a few CUDA graphs cover every size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`. For 0, return 1."""
    return 1 << max(0, count - 1).bit_length()


def batch_buckets(limit: int) -> tuple[int, ...]:
    """Return the sizes to which batches are padded: powers of two, sizes half-way between them, and `limit`.

    The smallest half-way size is 24. In smaller batches, padding is almost free, because a forward pass takes
    about as long as a pass over one row. More sizes would reduce the padding of large batches, but lengthen
    the start-up.
    """
    powers = powers_of_2(limit)
    halfway = (size + size // 2 for size in powers if size >= 16)
    return tuple(sorted({*powers, *(size for size in halfway if size < limit)}))


def row_buckets(limit: int) -> tuple[int, ...]:
    """Return the numbers of packed rows to which rounds are padded.

    These numbers are 1, 2, 4, the multiples of 8 up to 128, the multiples of 16 up to 256, and larger steps
    above 256. The last one is `limit`.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 64)]
    sizes += [*range(512, 1024, 128), *range(1024, 4097, 512)]
    return (*[size for size in sizes if size < limit], limit)


def powers_of_2(limit: int) -> tuple[int, ...]:
    """Return the powers of two below `limit` (1, 2, 4 …), and `limit` itself."""
    return (*(1 << power for power in range((limit - 1).bit_length())), limit)


def bucket(sizes: Seq[int], count: int) -> int | None:
    """Return the smallest of the ascending `sizes` that is at least `count`, or None if all are smaller."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def padded_size(sizes: Seq[int], count: int) -> int:
    """Return the smallest of the ascending `sizes` that is at least `count`.

    `count` must not exceed the last size. Use `bucket` if it may.
    """
    size = bucket(sizes, count)
    assert size is not None, "the caller keeps within the largest size"
    return size
