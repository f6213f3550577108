"""Bucket sizes that batches, trees and prompts are padded to, so that a few CUDA graphs cover every size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes to which batches (`batch_sizes`) and trees (`nodes`) are padded, in ascending order."""

    batch_sizes: tuple[int, ...]
    nodes: tuple[int, ...]

    @classmethod
    def make(cls, max_bs: int, max_nodes: int, usual_nodes: Seq[int] = ()) -> Buckets:
        """Return the buckets for batches of up to `max_bs` rows and trees of up to `max_nodes` nodes.

        The sizes for trees are the powers of two, `max_nodes`, and every entry of `usual_nodes` that does not
        exceed `max_nodes`. Trees of a usual size therefore need no padding.
        """
        return cls(
            batch_buckets(max_bs),
            tuple(sorted({*powers_of_2(max_nodes), *(size for size in usual_nodes if size <= max_nodes)})),
        )

    def batch_size(self, count: int) -> int | None:
        """Return the smallest bucket for a batch of `count` rows, or None if no bucket is large enough."""
        return bucket(self.batch_sizes, count)

    def num_nodes(self, count: int) -> int | None:
        """Return the smallest bucket for a tree of `count` nodes, or None if no bucket is large enough."""
        return bucket(self.nodes, count)


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`. For 0, return 1."""
    return 1 << max(0, count - 1).bit_length()


def batch_buckets(limit: int) -> tuple[int, ...]:
    """Return the sizes to which batches are padded: powers of two, sizes half-way between them, and `limit`.

    The half-way sizes start at 24. Padding a small batch is almost free, because a pass over it takes about
    as long as a pass over one row. In a large batch, every padding row costs time. More sizes would waste
    fewer rows but make start-up longer.
    """
    powers = powers_of_2(limit)
    halfway = (size + size // 2 for size in powers if size >= 16)
    return tuple(sorted({*powers, *(size for size in halfway if size < limit)}))


def powers_of_2(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4 … below `limit`, and `limit` itself."""
    return (*(1 << power for power in range((limit - 1).bit_length())), limit)


def bucket(sizes: Seq[int], count: int) -> int | None:
    """Return the first of the ascending `sizes` that is at least `count`, or None if there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
