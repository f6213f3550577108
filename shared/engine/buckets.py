"""The few sizes that batches, trees and prompts are padded to, so that few CUDA graphs serve all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that batches and trees are padded to, ascending."""

    batch_sizes: tuple[int, ...]
    nodes: tuple[int, ...]

    @classmethod
    def make(cls, max_bs: int, max_nodes: int, usual_nodes: Seq[int] = ()) -> Buckets:
        """Return `batch_buckets`, and powers of two up to the limit of nodes with the sizes that are usual as they are."""
        return cls(
            batch_buckets(max_bs),
            tuple(sorted({*powers_of_2(max_nodes), *(size for size in usual_nodes if size <= max_nodes)})),
        )

    def batch_size(self, count: int) -> int | None:
        """Return the bucket of a batch, or None above the largest."""
        return bucket(self.batch_sizes, count)

    def num_nodes(self, count: int) -> int | None:
        """Return the bucket of a tree, or None above the largest."""
        return bucket(self.nodes, count)


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def batch_buckets(limit: int) -> tuple[int, ...]:
    """Return the sizes that batches are padded to: powers of two, from 16 on those half-way between them too, and the limit itself.

    A small pass costs about as much as one of a single row. Of a large one every row costs, but so does every size at the start.
    """
    powers = powers_of_2(limit)
    halfway = (size + size // 2 for size in powers if size >= 16)
    return tuple(sorted({*powers, *(size for size in halfway if size < limit)}))


def powers_of_2(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4 … and the limit itself."""
    return (*(1 << power for power in range((limit - 1).bit_length())), limit)


def bucket(sizes: Seq[int], count: int) -> int | None:
    """Return the smallest of ascending `sizes` that holds `count`, or None above the largest."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
