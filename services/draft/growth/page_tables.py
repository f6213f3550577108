"""Page tables at fixed addresses, so that CUDA graphs can read them; new pages are copied in stream order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool

FIRST_WIDTH_TOKENS = 4096
"""Number of tokens that the narrowest table covers. Each wider table covers `WIDTH_FACTOR` times as many
tokens as the table before it."""
WIDTH_FACTOR = 4


class PageTable:
    """The page tables of a batch of sequences, in device memory of fixed size at a fixed address.

    Args:
        bs: Number of rows. Each row is the page table of one sequence.
        width: Number of pages per row.
        device: Device of the tensor.

    Attributes:
        tensor: ``[bs, width] int32``, the page numbers.
        places: ``[bs] int32``, the first page of each sequence that was not stored before the sequence began
            (`PageLease.first_new_page`).
    """

    def __init__(self, bs: int, width: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._packed = torch.zeros(bs * width + bs, dtype=torch.int32, device=device)
            self.tensor = self._packed[: bs * width].view(bs, width)
            self.places = self._packed[bs * width :]
        self._packed_host = np.zeros(bs * width + bs, dtype=np.int32)
        self._host = self._packed_host[: bs * width].reshape(bs, width)
        self._places_host = self._packed_host[bs * width :]
        self._written: list[tuple[PageLease | None, int]] = [(None, 0)] * bs
        self._staged: torch.Tensor | None = None

    def update(self, leases: Sequence[PageLease | None], *, later: bool = False) -> None:
        """Write the pages of every new or changed lease to the table: lease i to row i.

        A row without a lease keeps its old contents, which no kernel reads.

        Args:
            leases: One lease per row. None for a row without a lease.
            later: If True, do not copy the changes to the device yet. The next call of `flush` copies them.
        """
        changed = False
        for row, lease in enumerate(leases):
            if lease is None:
                continue
            known, version = self._written[row]
            if known is not lease or version != lease.version:
                pages = lease.pages[: self._host.shape[1]]
                self._host[row, : len(pages)] = pages
                self._places_host[row] = lease.first_new_page
                self._written[row] = lease, lease.version
                changed = True
        if changed:
            fresh = torch.from_numpy(self._packed_host)
            # The host continues while pinned memory is copied to the device, and torch keeps that memory
            # alive until the copy is done. pin_memory() makes a copy of the array, so the array may change
            # immediately.
            self._staged = fresh.pin_memory() if self.tensor.is_cuda else fresh
        if not later:
            self.flush()

    def flush(self) -> None:
        """Copy to the device, in stream order, the changes that `update` has not copied yet."""
        if self._staged is not None:
            self._packed.copy_(self._staged, non_blocking=True)
            self._staged = None


class PageTables:
    """The page tables of one KV pool, by batch size and width.

    Widths are rounded up to a few values, because a graph is recorded for each width.

    Args:
        pool: The KV pool.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._tables: dict[tuple[int, int, int], PageTable] = {}

    def width_for(self, num_tokens: int) -> int | None:
        """Return the width of a table for a sequence of this length; None if the pool is too small."""
        if self._pool.pages_for(num_tokens) > self._pool.num_pages:
            return None
        tokens = FIRST_WIDTH_TOKENS
        while tokens < num_tokens:
            tokens *= WIDTH_FACTOR
        return min(self._pool.pages_for(tokens), self._pool.num_pages)

    def find(self, bs: int, width: int, place: int = 0) -> PageTable:
        """Return the page table of this size. Rounds of equal sizes use the same table, in turn.

        Args:
            bs: Number of rows, one per sequence.
            width: Number of pages per row.
            place: Number that distinguishes several tables of one size. If two tables are written before
                either of them is used, they need different numbers.
        """
        key = (bs, width, place)
        if key not in self._tables:
            self._tables[key] = PageTable(bs, width, self._pool.device)
        return self._tables[key]
